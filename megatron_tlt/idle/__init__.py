"""What ranks do while they wait for the slowest one: states, policy, coordination over MPI, the window."""
