"""Draws the charts and graphs of the report as SVG."""
