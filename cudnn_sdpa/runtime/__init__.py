"""The runtime: knows cuDNN, knows no operation."""
