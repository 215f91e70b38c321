"""Runs one stage at a time on a machine: a starting stage takes the machine's slot, the others wait for it.

The slot is a global concurrency limit of the Prefect server, named by ALIGNFLOW_LIMIT; `alignflow serve` makes it and sets the variable.
Without the variable there is no limit. A slot is freed when the stage ends, or a minute after its run was killed with -9.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.concurrency.sync import concurrency

LIMIT_ENV = "ALIGNFLOW_LIMIT"
LEASE_SECONDS = 60.0


@contextmanager
def machine() -> Iterator[None]:
    """Holds the machine's slot until the block ends. When the server fails meanwhile, the stage continues."""
    if name := os.environ.get(LIMIT_ENV):
        with concurrency(name, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False):
            yield
    else:
        yield
