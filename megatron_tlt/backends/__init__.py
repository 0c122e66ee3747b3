"""Rollout backends behind one interface."""
