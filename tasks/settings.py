"""Prefect's settings, as defaults of the environment: what a user has set stays. Read by Prefect at import, so applied before it."""

import os

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # beside it SQLite reports "database is locked"
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # the first start makes the database; 20 s is short on a busy laptop
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def apply() -> None:
    """Sets what is not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
