"""Options of commands that serve pages."""

from __future__ import annotations

import io
import os
import pty
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from flows.cli.app import main
from flows.cli.operate.dashboard import show_address
from flows.cli.operate.label import show_addresses
from flows.serving import page_options as page_server
from flows.serving.services import LISTENER, Services, listen
from rlhf_core.system.pages.secret_file import kept_secret

WAIT = 60.0  # seconds for an answer


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], socket.socket]]:
    """Opens connections to a server that takes two."""
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 3)
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])
    server = uvicorn.Server(
        page_server.server_config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    opened = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        deadline = time.monotonic() + WAIT
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)

        def connect() -> socket.socket:
            opened.append(socket.create_connection(listener.getsockname()[:2], WAIT))
            return opened[-1]

        yield connect
        for one in opened:
            one.close()
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def test_headers_without_an_end_are_refused_and_not_kept(listening: Callable[[], socket.socket]) -> None:
    one = listening()
    one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 100_000)
    assert one.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_connection_without_whole_headers_is_closed(
    listening: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = listening()
    partial.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert partial.recv(1000).startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(page_server, "HEADER_SECONDS", 0.3)
    silent = listening()
    partial.sendall(b"GET / HTTP/1.1\r\n")
    assert silent.recv(1000) == partial.recv(1000) == b""


def test_connections_above_the_limit_get_503(listening: Callable[[], socket.socket]) -> None:
    request = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answers = []
    for _ in range(3):
        one = listening()  # stays open
        one.sendall(request)
        answers.append(one.recv(1000)[:12])
    assert answers == [b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 503"]


def test_names_of_hosts() -> None:
    assert page_server.host_names("127.0.0.1", "box.lan,,proxy") == ["127.0.0.1", "box.lan", "proxy"]
    assert page_server.host_names("0.0.0.0", "") == ["0.0.0.0", socket.gethostname()]
    with pytest.raises(ValueError, match="--allow-host http://x: give names"):
        page_server.host_names("127.0.0.1", "http://x")


def test_a_log_of_the_labelling_page_has_no_token() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        show_addresses(
            Console(file=out, force_terminal=terminal),
            "http://127.0.0.1:8020",
            "the-token",
            Path("/h/label-token"),
        )
        assert ("token=the-token" in out.getvalue()) == terminal
        assert ("the token is in /h/label-token" in out.getvalue()) != terminal


def test_the_endpoint_for_feedback_answers_for_the_hosts_of_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def start(
        services: Services, name: str, command: list[str], environment: dict[str, str], descriptors: list[int]
    ) -> None:
        """The process inherits a socket that listens already: no other one can take the port and get a
        token."""
        commands.append(command)
        assert environment[LISTENER] == str(descriptors[0])
        socket.create_connection(("127.0.0.1", int(command[command.index("--port") + 1])), timeout=10).close()

    monkeypatch.setattr(Services, "_start", start)
    services = Services(tmp_path, "127.0.0.1", 4200, ["box.lan", "proxy.example"])
    assert re.fullmatch(
        r"http://127.0.0.1:\d+/feedback", services.start_feedback(["r.yaml"], [tmp_path / "a.inbox"], 0)
    )
    (command,) = commands
    assert command[command.index("--allow-host") + 1] == "127.0.0.1,box.lan,proxy.example"


def test_a_process_takes_the_socket_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        monkeypatch.setenv(LISTENER, str(os.dup(given.fileno())))
        with listen("127.0.0.1", 0) as listener:
            assert listener.getsockname() == given.getsockname() and LISTENER not in os.environ


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["absent"], "this folder does not exist: give the `artifacts` folder"),
        ([".", "--port", "99999"], "99999 is not a port"),
        ([".", "--allow-host", "a b"], "--allow-host a b: give names or addresses of hosts"),
    ],
)
def test_wrong_input_is_one_sentence(
    options: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard", *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert (
            main(
                [
                    "dashboard",
                    str(tmp_path),
                    "--port",
                    str(other.getsockname()[1]),
                    "--home",
                    str(tmp_path / "home"),
                ]
            )
            == 3
        )
    assert "give another --port or --host" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_the_token_and_a_log_the_file_that_holds_it(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):  # rich takes them for a terminal's
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "a folder" / "dashboard-token"
    token = kept_secret(file)
    # the next start has the same token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and kept_secret(file) == token
    end, other = pty.openpty() if terminal else os.pipe()
    with os.fdopen(end, "rb", 0) as seen, os.fdopen(other, "w") as out:
        show_address(
            Console(file=out, soft_wrap=True), Path("artifacts"), "http://127.0.0.1:8123/", token, file
        )
        text = b""
        while b"\n" not in text:
            text += seen.read(10_000)
    shown = (
        f"http://127.0.0.1:8123/?token={token}"
        if terminal
        else f"http://127.0.0.1:8123/?token=... (the token is in {file})"
    )
    assert text.decode().splitlines()[0] == f"artifacts is shown at {shown}"
