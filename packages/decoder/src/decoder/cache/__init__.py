"""Keys and values: of the whole text for the target, and of parts of it for draft passes."""
