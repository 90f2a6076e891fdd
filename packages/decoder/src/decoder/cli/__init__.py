"""The command `python -m decoder`."""
