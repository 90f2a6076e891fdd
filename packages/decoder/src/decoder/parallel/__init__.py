"""One model on several processes: which of them decides, how the model is shared, and what was shared read whole."""
