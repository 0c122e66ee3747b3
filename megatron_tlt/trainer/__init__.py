"""Training runs: putting one together, the RL loop, evaluation, supervised fine-tuning."""
