"""Run checkpoints, export to Hugging Face, conversion between Hugging Face and Megatron."""
