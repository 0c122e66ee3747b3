"""What a configuration needs: memory per rank, and the report of `megatron-tlt check`. Torch-free."""
