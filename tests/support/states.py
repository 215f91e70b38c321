"""Waits for resume states that are written beside the work of a test."""

from __future__ import annotations

import threading


def wait_until_complete() -> None:
    """Returns once no state is being written in this process, so that a test's kill comes after it."""
    for thread in threading.enumerate():
        if thread.name in ("state writer", "state commit"):
            thread.join(60)
            assert not thread.is_alive(), f"the {thread.name} has not ended in 60 s"
