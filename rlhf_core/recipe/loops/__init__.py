"""Manages the rounds of loops: their record on disk, their state, and the steps from one round to the next.
Torch-free."""
