"""vLLM as a rollout backend: an engine in a process and a Python environment of its own, sampling with our noise."""
