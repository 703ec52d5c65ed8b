"""Who runs which micro-batch when."""
