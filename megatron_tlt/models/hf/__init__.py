"""Files of Hugging Face: configurations, weights, adapters, in and out."""
