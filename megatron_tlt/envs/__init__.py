"""Environments of multi-turn rollouts: what answers a drawn turn, in worker processes."""
