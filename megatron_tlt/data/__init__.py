"""Prompts, procedural tasks, tokenizers and sequence packing."""
