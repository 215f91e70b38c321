"""Copies of finished stages in a store: access to files over any fsspec protocol, and the store's layout."""
