"""Is this machine fit to run Megatron-TLT? Small checks that change nothing, and hints."""
