"""Training EAGLE-3 drafters."""
