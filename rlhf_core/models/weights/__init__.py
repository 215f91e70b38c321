"""Reads, cuts, rounds and describes the weights of models."""
