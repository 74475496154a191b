"""A run: when to save, what to keep, who may write, where to go on."""
