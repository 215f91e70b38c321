"""Checks of model families: a small copy of each model is loaded, trained and sampled before any work."""
