"""The embedded rollout engine: scheduler, paged KV cache, keyed sampling."""
