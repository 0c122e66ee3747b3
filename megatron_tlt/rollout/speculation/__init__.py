"""Speculative decoding: drafters, verification by the policy, and the choice of draft lengths."""
