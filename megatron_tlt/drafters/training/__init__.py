"""Training of drafters, during RL and from recorded responses."""
