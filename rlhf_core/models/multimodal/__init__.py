"""Adds the image encoders of multimodal checkpoints to their language models."""
