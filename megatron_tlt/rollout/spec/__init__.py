"""Speculative decoding: what drafters propose, how the policy verifies it, and when it pays."""
