"""Integrations with other libraries' models. Each imports its library on demand."""
