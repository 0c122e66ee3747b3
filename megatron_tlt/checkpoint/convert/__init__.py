"""Checkpoints from Hugging Face to Megatron and back, and their inspection."""
