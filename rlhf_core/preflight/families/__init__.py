"""Checks model families: loads, trains and samples from a small copy of each model before any stage
starts."""
