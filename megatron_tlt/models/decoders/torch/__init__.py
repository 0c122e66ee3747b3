"""The PyTorch decoder and its attention."""
