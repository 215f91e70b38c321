"""Reward sources that are Python functions written by the user, each running in its own processes."""
