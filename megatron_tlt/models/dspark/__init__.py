"""The block drafter (DSpark, DFlash): shapes, model, rollout form."""
