"""The simulator: RL steps of a cluster under a virtual clock, with the production decision code. Torch-free."""
