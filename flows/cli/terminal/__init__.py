"""The output of `run`, `stage` and `demo` on a terminal, during the run and at its end."""
