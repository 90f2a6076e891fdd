"""DFlash's draft model, which drafts a whole block in one pass (arXiv 2602.06036)."""
