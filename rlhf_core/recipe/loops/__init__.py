"""Rounds of loops: their record on disk, their state, and the steps from round to round. Torch-free."""
