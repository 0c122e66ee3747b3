"""Weight transport from the actor's shards to every rollout engine."""
