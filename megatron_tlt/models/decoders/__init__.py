"""Decoders of the embedded engine, in C (`native`) and PyTorch (`torch`), and what they share."""
