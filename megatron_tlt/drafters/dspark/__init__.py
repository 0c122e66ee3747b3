"""DSpark, DFlash as one without a Markov head, and DFlash 2."""
