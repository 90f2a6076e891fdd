"""The one-layer drafter of EAGLE-3 (arXiv 2503.01840): its module and its checkpoints."""
