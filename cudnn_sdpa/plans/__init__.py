"""Compiled plans: built, cached, stored, tuned."""
