"""EAGLE-1 in TLT's form."""
