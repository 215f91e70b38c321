"""What a recipe may say of evaluations: judges, calibrations, drift, publication, and tasks of lm-eval."""
