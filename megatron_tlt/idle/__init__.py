"""Idle ranks, which wait for the slowest one: states, policy, coordination over MPI, the window."""
