"""Evaluation: episodes of one policy or of two, and scores with confidence intervals."""
