"""Modules with the names, parameters and results of other attention libraries, for code that was written for those."""
