"""Passes of a model on its device: one room for each kind of device, and what they share."""
