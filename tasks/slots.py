"""One machine trains one thing at a time: a stage that starts takes the machine's slot, the others wait for theirs.

The slot is a global concurrency limit of the Prefect server, named by ALIGNFLOW_LIMIT; `alignflow serve` makes it and sets the variable.
Without the variable nothing is taken. A slot comes back when the stage ends, or a minute after its run was killed with -9.
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
    """Holds the machine's slot until the block ends. A server that goes away meanwhile does not stop the stage."""
    if name := os.environ.get(LIMIT_ENV):
        with concurrency(name, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False):
            yield
    else:
        yield
