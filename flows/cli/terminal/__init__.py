"""What `run`, `stage` and `demo` show on a terminal while they run, and at their end."""
