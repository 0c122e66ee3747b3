"""Kinds of trained drafters: one folder a kind, found by name in `registry`."""
