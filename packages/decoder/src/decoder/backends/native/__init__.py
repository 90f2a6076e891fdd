"""The native backend: a C library for any CPU, whose results have the same bits whatever else is in a pass."""
