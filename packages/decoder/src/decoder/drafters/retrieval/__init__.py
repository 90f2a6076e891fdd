"""Drafts from the text itself: n-grams and suffixes."""
