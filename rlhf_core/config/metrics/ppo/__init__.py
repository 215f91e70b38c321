"""Declares the metrics of PPO and their charts."""
