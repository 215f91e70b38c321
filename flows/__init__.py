"""Prefect flows and the command line. Importing the package sets defaults of Prefect's settings before
Prefect is imported."""

import tasks as tasks
