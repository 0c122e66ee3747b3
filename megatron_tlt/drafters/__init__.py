"""Trained drafters: what all kinds share, a folder a kind, training, exports. `registry` finds a kind by its name."""
