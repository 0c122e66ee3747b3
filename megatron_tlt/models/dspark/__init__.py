"""The block drafter (DSpark, DFlash, DFlash 2): shapes, model, rollout form."""
