"""Other libraries' models on this library's attention. Each module imports its library when it is asked to."""
