"""Turns the rewards of an answer's sources into the advantages of its tokens."""
