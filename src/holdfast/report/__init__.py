"""Metrics and their files, trackers, console and dashboard, check reports and plots."""
