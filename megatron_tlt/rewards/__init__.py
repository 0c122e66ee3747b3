"""Reward functions and the pool that runs them."""
