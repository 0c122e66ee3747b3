"""Keeping a job alive, and ending it with everything saved."""
