"""Protects servers of local pages: tokens, the files that store them, and the form that requests one."""
