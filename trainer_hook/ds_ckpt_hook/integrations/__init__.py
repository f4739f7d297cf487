"""The hook where a framework owns the training loop: one module for each, imported by its users."""
