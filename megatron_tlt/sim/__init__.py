"""What a run would take on a cluster that nobody has to buy: RL steps under a virtual clock. Torch-free."""
