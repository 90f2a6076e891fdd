"""`ts-eval bench`: what the parts of a step cost here."""
