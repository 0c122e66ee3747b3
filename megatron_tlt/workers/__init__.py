"""Processes in which a user's code runs beside a rank, and the loading of that code. Without MPI and torch."""
