"""A webhook receiver for tests: records messages and answers with given codes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.http_handler import JsonHandler, handled_by

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

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            message = self.question()
            if receiver.hang:
                receiver.released.wait(60)
                return
            code = receiver.answers.pop(0) if receiver.answers else 200
            if code == 200:
                receiver.got.append(message)
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with handled_by(Handler) as address:
        receiver.url = f"{address}/hook?token={TOKEN}"
        try:
            yield receiver
        finally:
            receiver.released.set()
