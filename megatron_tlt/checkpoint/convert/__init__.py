"""Checkpoints from Hugging Face to Megatron and back."""
