"""Logging, events, metrics and progress: everything a person looks at."""
