"""Drafters in the formats of serving engines."""
