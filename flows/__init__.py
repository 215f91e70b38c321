"""Defines Prefect flows and the command line. Importing the package sets defaults for Prefect's settings
before Prefect is imported."""

import tasks as tasks
