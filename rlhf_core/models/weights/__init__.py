"""Reads, shards, rounds and describes the weights of models."""
