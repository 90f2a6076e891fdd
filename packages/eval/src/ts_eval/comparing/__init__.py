"""A comparison: prompts, methods, their generations in turn, checks of their texts, what is kept and resumed."""
