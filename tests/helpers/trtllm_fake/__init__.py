"""A `tensorrt_llm` made from a recorded contract. Standard library only: it also runs in child processes."""
