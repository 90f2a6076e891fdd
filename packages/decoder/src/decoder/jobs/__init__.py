"""Files of many requests, answered together: what a file asks, what has been answered, and who answers."""
