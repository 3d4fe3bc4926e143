"""Which plans calls would need, without making them: `record_plans` and `support`."""
