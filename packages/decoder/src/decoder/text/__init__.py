"""Text and token ids: prompts to tokens, tokens to text, and what ends a text."""
