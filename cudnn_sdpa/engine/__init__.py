"""One call of any operation."""
