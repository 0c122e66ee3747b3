"""The C decoder and drafter for CPUs, and their library."""
