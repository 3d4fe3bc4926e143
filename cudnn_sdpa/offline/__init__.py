"""Planning with the real cuDNN for a GPU that is not in this machine.

cuDNN plans and compiles for any GPU that a device-properties file describes. This runs in a helper process, so a crash
of the planner does not kill the caller's process, and the stand-in for a missing NVIDIA driver is loaded only there.
"""
