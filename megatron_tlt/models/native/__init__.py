"""The C decoder for CPUs, its library and what calls it."""
