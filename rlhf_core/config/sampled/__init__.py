"""Configures stages that sample answers: what they share, rounds, and loops."""
