"""cuDNN graphs and their keys; independent of plans and operations."""
