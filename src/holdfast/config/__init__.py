"""Configuration: every key with its default, and `key=value` overrides."""
