"""Training the drafter: losses, batches, the trainer and its files."""
