"""Pauses Python's garbage collector during work that creates many long-lived objects, and excludes imported
libraries from it.

During such work the collector traverses many objects and frees almost none. It takes a fifth of the time of
importing a large library, and of an engine step over thousands of requests.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables the garbage collector within the block, and restores its state afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_libraries() -> None:
    """Excludes all existing objects from garbage collection until this process exits. Call it after imports,
    because a full collection over the objects of large libraries takes a third of a second, and engines force
    several while they start."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries count their remaining objects at exit
