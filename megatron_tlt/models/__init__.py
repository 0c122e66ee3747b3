"""Language models: their files (`hf`) and the decoders of the rollout engine (`decoders`)."""
