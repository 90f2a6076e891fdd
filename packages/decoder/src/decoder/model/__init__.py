"""The Hugging Face model: which architectures can be decoded, how models are read, and their forward passes."""
