"""Checkpoints and run folders: write, verify, resume from."""
