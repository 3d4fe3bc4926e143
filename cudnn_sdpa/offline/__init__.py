"""Planning with real cuDNN for a GPU that is not in this machine.

cuDNN plans and compiles for any GPU that a device-properties file describes. All of it happens in a helper process:
a crash of the planner is an answer and no dead process, and where there is no NVIDIA driver, the stand-in for it is
loaded there and nowhere else.
"""
