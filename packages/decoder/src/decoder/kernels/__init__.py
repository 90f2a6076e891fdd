"""Code that runs on the device: attention, rotary embeddings, norms, linear layers, recorded passes, transfers."""
