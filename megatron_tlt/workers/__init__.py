"""Processes in which a user's code runs beside a rank, the loading of that code, and what several of
them need of answers. Without MPI and torch."""
