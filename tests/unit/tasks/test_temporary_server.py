"""When Prefect's temporary server is restarted and when not. (tests/flows/test_crash.py kills a real one.)"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tasks import server_process, temporary_server
from tasks.server_process import ServerProcess, prepared
from tasks.temporary_server import RESTARTS, keep_server


class Server:
    """Stub of the server; only the end of its process matters."""

    def __init__(self) -> None:
        self.server_process: subprocess.Popen[bytes] | None = None
        self.running = False
        self.starts = 0
        self.answers = True
        self.begun = True

    def start(self, seconds: float | None = None) -> None:
        if not self.running:
            self.running = True
            self.starts = self.starts + 1
            self.server_process = subprocess.Popen(
                [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
            )
            if not self.answers:
                raise RuntimeError("Timed out while attempting to connect to ephemeral Prefect API server.")

    def kill(self) -> None:
        assert self.server_process is not None
        self.server_process.kill()
        self.server_process.communicate()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    monkeypatch.setattr(temporary_server, "ours", made)
    monkeypatch.setattr(temporary_server, "_ended", [])
    monkeypatch.setattr(temporary_server, "_over", threading.Event())
    made.start()
    yield made
    made.kill()


def test_one_that_ends_is_started_again_three_times(server: Server) -> None:
    keep_server()
    assert server.starts == 1, "one that lives is left alone"
    for count in range(1, RESTARTS + 3):
        server.kill()
        keep_server()
        assert server.starts == 1 + min(count, RESTARTS)


def test_one_that_does_not_answer_is_tried_again(server: Server) -> None:
    server.answers = False
    server.kill()
    keep_server()
    server.kill()
    server.answers = True
    keep_server()
    assert server.starts == 3 and server.running


def test_nothing_is_started_where_none_was_or_at_the_end(server: Server) -> None:
    server.kill()
    server.begun = False
    keep_server()
    server.begun = True
    temporary_server._over.set()
    keep_server()
    assert server.starts == 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    made = ServerProcess()
    monkeypatch.setattr(server_process, "ours", made)
    yield made
    made.stop()


def test_one_that_was_prepared_for_nothing_ends_at_once(process: ServerProcess) -> None:
    with pytest.raises(ValueError, match="refused"), prepared():
        assert process.server_process is not None and process.server_process.poll() is None
        raise ValueError("refused")
    assert process.server_process is not None
    assert process.server_process.returncode == -signal.SIGKILL, "not with SIGTERM and some seconds to end"


def test_one_that_was_told_to_begin_outlives_the_block(process: ServerProcess) -> None:
    with prepared():
        process.begin()
    assert process.running and process.server_process is not None and process.server_process.poll() is None
    process.stop()
    assert not process.running and process.server_process.returncode is not None


def test_one_whose_process_ends_is_told_and_begins_again_at_its_address(process: ServerProcess) -> None:
    process.prepare()
    address = process.api_url
    assert process.server_process is not None
    process.server_process.kill()
    with pytest.raises(RuntimeError, match="ended, or did not answer"):
        process.begin()  # another one: the first has ended
        process.server_process.kill()
        process.start(60)
    assert not process.running
    process.begin()
    assert process.running and process.api_url == address
