"""`ts-eval plan`: memory and the least time of a step, computed from a model's shape."""
