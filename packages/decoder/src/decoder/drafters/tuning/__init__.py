"""Trees chosen by what they cost on this machine and how often drafts were accepted."""
