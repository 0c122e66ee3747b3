"""Policy-gradient algorithms, one file each."""
