"""Configures what reward sources share, models behind endpoints, and judges as reward sources."""
