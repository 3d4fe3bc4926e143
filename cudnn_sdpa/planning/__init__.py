"""Determines which plans calls need, without running them: `record_plans` and `support`."""
