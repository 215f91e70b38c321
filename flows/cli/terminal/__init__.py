"""Terminal output of `run`, `stage` and `demo`, during a run and at its end."""
