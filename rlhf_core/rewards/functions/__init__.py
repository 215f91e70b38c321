"""Runs reward sources that are Python functions written by the user, each in its own processes."""
