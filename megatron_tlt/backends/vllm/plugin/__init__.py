"""What runs inside vLLM: the only folder that imports it. Modules of this package come along, vLLM's torch computes."""
