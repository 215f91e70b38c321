"""Reward sources that are Python functions of the user, each in its own processes."""
