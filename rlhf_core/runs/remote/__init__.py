"""Copies of finished stages in a store: files of any fsspec protocol, and the layout in them."""
