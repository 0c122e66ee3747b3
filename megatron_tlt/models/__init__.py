"""Decoder models of the rollout engine: configuration, weights, forward passes."""
