"""EAGLE drafters: models, and the PyTorch drafting steps."""
