"""The multi-token-prediction (MTP) modules that checkpoints have built in, as a drafter of one layer."""
