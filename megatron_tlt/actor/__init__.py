"""The Megatron-core policy: build, score, update, checkpoint."""
