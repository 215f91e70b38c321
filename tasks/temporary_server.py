"""Runs a temporary Prefect server for a flow for which no other server is configured, and restarts the server
if it ends before the flow.

The server only records events, but without it a run tries for minutes to record its end and then fails. The
server is alignflow's own (see `server_process.py`); unlike Prefect's, it requires an auth string and starts
quickly.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from prefect import Flow
from prefect.client.base import ServerType, determine_server_type
from prefect.context import refresh_global_settings_context
from prefect.logging import get_logger
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from rlhf_core.system import orphan_watcher
from rlhf_core.system.machine import MachineLacks
from tasks.fresh_database import lay_database
from tasks.server_process import AUTH, ours

POLL_SECONDS = 0.5
RESTARTS = 3
_turn = threading.Lock()
_over = threading.Event()
_ended: list[int] = []  # exit codes of servers that were restarted


def start_server() -> None:
    """Starts this process's own server and makes Prefect use it. Does nothing if another server is
    configured.

    Raises MachineLacks when it does not start. Prefect would retry its own server forever, for example when
    the database cannot be opened.
    """
    if ours.begun and os.environ.get("PREFECT_API_URL") == ours.api_url:  # a second flow of this process
        keep_server()
        return
    if determine_server_type() != ServerType.EPHEMERAL:
        ours.stop()  # a Prefect profile names another server, so this one is not needed
        return
    if orphan_watcher.MARK not in os.environ:
        orphan_watcher.start()
    lay_database()
    with contextlib.suppress(OSError):  # tried once more below
        ours.begin()
    # Every run imports this module at its end, which takes two seconds; meanwhile the server starts.
    from evaluation.report import run_page  # noqa: F401

    try:
        ours.start(_start_seconds())
    except (OSError, RuntimeError):
        raise MachineLacks(
            f"Prefect's temporary server ended, or did not answer within {_start_seconds()} s (its output is"
            f" above): check its database in {PREFECT_HOME.value()}; on a slow machine raise"
            " PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS; or start a server and set PREFECT_API_URL"
        ) from None
    os.environ.update({"PREFECT_API_URL": ours.api_url, AUTH: ours.auth})
    os.environ.setdefault("PREFECT_UI_URL", "")  # the server has no pages to link to
    refresh_global_settings_context()  # for all threads
    atexit.register(_over.set)  # runs before the handler that ends the server
    threading.Thread(target=_watch, name="temporary-server", daemon=True).start()


class OwnServerFlow(Flow[..., Any]):
    """A flow that starts this process's own server when called, if none is configured. Prefect's own
    temporary server would answer requests from anyone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start_server()
        return super().__call__(*args, **kwargs)


def without_heartbeats() -> AbstractContextManager[object]:
    """Disables heartbeats of flows in the block if this process's own server is running. That server does not
    check heartbeats, and they would delay the flow's end by half a second."""
    return (
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
        if ours.running
        else contextlib.nullcontext()
    )


def _watch() -> None:
    while not _over.wait(POLL_SECONDS):
        keep_server()


def keep_server() -> None:
    """Restarts this process's own server if it has ended, at the same address and with the same database, at
    most three times. Returns once it answers, because a client created while there is no server would fail
    immediately."""
    with _turn:
        process = ours.server_process
        if (
            not ours.begun
            or process is None
            or process.poll() is None
            or len(_ended) == RESTARTS
            or _over.is_set()
        ):
            return
        _ended.append(process.returncode)
        get_logger("alignflow").warning(
            "Prefect's temporary server ended with code %d: restarting it", process.returncode
        )
        ours.running = False
        with contextlib.suppress(OSError, RuntimeError):
            ours.start(_start_seconds())


def _start_seconds() -> int:
    """Returns the start timeout in seconds, at least 60; Prefect's 20 are too few for the migrations of a
    large database."""
    return max(60, int(PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()))
