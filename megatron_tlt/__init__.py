"""Megatron-TLT: RL training of reasoning LLMs on Megatron-core with speculative rollouts."""
