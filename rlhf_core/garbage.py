"""Work during which Python's collector would look through many objects again and again, and find next to nothing to collect.

Imports of large libraries spend a fifth of their time on that; an engine's step, between the objects of thousands of requests, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it nothing is collected; afterwards the collector is on if it was before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
