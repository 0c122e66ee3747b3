"""EAGLE-3."""
