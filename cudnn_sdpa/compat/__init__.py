"""Modules with the names and signatures of other attention libraries."""
