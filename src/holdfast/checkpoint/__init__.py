"""Checkpoints and run directories: write, verify, resume from."""
