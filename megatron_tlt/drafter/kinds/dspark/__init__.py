"""DSpark, and DFlash as one without a Markov head."""
