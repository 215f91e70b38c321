"""Prefect's temporary server, which it starts beside a flow that was given no other: it is started again when it ends before the flow.

It only notes what happens. Without this, a run whose temporary server was killed works on to the end of its stage and then fails, after
minutes of trying to note that end.
"""

from __future__ import annotations

import atexit
import sys
import threading
from functools import cache

from prefect.logging import get_logger
from prefect.settings import PREFECT_API_URL

POLL_SECONDS, RESTARTS = 0.5, 3
_turn, _over = threading.Lock(), threading.Event()
_ended: list[int] = []  # exit codes of servers that were replaced


@cache
def watch_server() -> None:
    """Looks after this process's temporary server, if it has one, from now to the process's end."""
    if not PREFECT_API_URL.value():
        atexit.register(_over.set)  # called before what Prefect has registered: that ends the server
        threading.Thread(target=_watch, name="temporary-server", daemon=True).start()


def keep_server() -> None:
    """Starts the temporary server again, at its address and with its database, when it has ended; three times at most. Returns when it
    answers: a client that is made while there is none would fail at once."""
    module = sys.modules.get("prefect.server.api.server")  # seconds to import: it is there once such a server was started
    if PREFECT_API_URL.value() or module is None:
        return
    server = module.SubprocessASGIServer()  # the one of this process, which Prefect starts and ends
    with _turn:
        process = server.server_process
        if process is None or process.poll() is None or len(_ended) == RESTARTS or _over.is_set():
            return
        _ended.append(process.returncode)
        get_logger("alignflow").warning("Prefect's temporary server ended with code %d: it is started again", process.returncode)
        server.running = False
        try:
            server.start()
        except RuntimeError as error:  # it did not answer in time; the next look tries once more
            get_logger("alignflow").warning("%s", error)
        atexit.register(_over.set)  # before what `start` has registered


def _watch() -> None:
    while not _over.wait(POLL_SECONDS):
        keep_server()
