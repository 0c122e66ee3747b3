"""Every rule about a configuration, by topic."""
