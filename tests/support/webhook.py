"""A webhook receiver for tests: records messages and answers with given codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "s3cr3t-t0ken"


class Receiver:
    """`answers` are the codes of the next requests, then 200; with `hang` it takes requests and never
    answers."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.hang = False
        self.released = threading.Event()
        self.url = ""

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.got]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.hang:
                receiver.released.wait(60)
                return
            code = receiver.answers.pop(0) if receiver.answers else 200
            if code == 200:
                receiver.got.append(json.loads(body))
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/hook?token={TOKEN}"
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
