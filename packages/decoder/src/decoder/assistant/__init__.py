"""Assistants: the drafters that are published beside Gemma 4, which attend to the model's own keys and values."""
