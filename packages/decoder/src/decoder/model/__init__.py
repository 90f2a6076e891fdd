"""The Hugging Face model as it is run here: which ones can be, how they are read, and their forward passes."""
