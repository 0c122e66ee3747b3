"""Knowing what every rank does, and ending a job that does nothing: heartbeats, stacks, verdicts."""
