"""Modules: functions of this library with their arguments, and what they keep between calls."""
