"""Memory per rank of a configuration, and the report of `megatron-tlt check`. Torch-free."""
