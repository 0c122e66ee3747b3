"""Where megatron-core looks for `base`."""
