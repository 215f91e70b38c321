"""Prefect's temporary server, for a command that was given none, out of reach of Ctrl-C.

A terminal sends Ctrl-C to all processes of a command. A server that it ends at once leaves the run without anybody to say its end to: it
was seen to try for minutes. So the server is started with that signal blocked, which it inherits, and ends when the command does.
"""

from __future__ import annotations

import contextlib
import signal
import threading

from prefect.client.base import ServerType, determine_server_type
from prefect.server.api.server import SubprocessASGIServer


def start_server() -> None:
    """Starts the temporary server that Prefect would start a little later; does nothing where a server is named.

    A server that does not start is left to Prefect, which tries again and says why.
    """
    if determine_server_type() == ServerType.EPHEMERAL:
        # In a thread: a thread has its own blocked signals, and the main one can still be interrupted while it waits.
        starter = threading.Thread(target=_start, daemon=True)
        starter.start()
        starter.join()


def _start() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with contextlib.suppress(Exception):
        SubprocessASGIServer().start()
