"""`ts-eval reproduce`: the paper's experiments beside its figures."""
