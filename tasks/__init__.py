"""Defines Prefect tasks and their helpers. Importing the package sets defaults for Prefect's settings, which
Prefect reads on import, and keeps requests to this machine away from proxies."""

import os

from rlhf_core.system.proxies import bypass_loopback

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # otherwise SQLite reports "database is locked"
    "DO_NOT_TRACK": "1",
    # the first start creates the database; 20 s is too short on a busy laptop
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
bypass_loopback()
