"""Metrics and their files, trackers, console and dashboard, check reports and plots."""

SEEDS = "seeds.json"
"""The file of a folder that holds one run for each of several seeds."""
