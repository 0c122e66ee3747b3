"""Checkpoints from Hugging Face to Megatron and back, and what is in them."""
