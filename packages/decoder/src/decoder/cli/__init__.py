"""The commands in the terminal."""
