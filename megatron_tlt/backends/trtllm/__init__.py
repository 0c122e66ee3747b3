"""The TensorRT-LLM rollout backend: a client here, a server process in its own environment."""
