"""The native module: calls repeated in C++, compiled for this PyTorch and this Python on the user's machine."""
