"""Training: set up, loop, save, evaluate; resume and stop."""
