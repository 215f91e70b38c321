"""Prefect tasks: one for each verb. Importing the package settles Prefect's settings, before Prefect is imported."""

from tasks import settings

settings.apply()
