"""Keys and values: of the whole sequence for the target, and of parts of it for draft passes."""
