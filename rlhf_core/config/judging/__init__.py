"""Configures evaluations: judges, calibrations, drift, publication, and tasks of lm-eval."""
