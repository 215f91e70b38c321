"""Prefect flows and the command line. Importing the package settles Prefect's settings, before Prefect is imported."""

import tasks as tasks
