"""Where megatron-core looks for `rope`."""
