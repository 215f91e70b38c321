"""An OpenAI-compatible chat endpoint: a small HTTP server in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "sk-this-must-not-be-written"
Reply = tuple[int, dict[str, str], bytes]


def completion(text: str | None, finish_reason: str = "stop", **usage: Any) -> Reply:
    body = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [
            {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, **usage},
    }
    return 200, {"content-type": "application/json"}, json.dumps(body).encode()


def error(status: int, **headers: str) -> Reply:
    return (
        status,
        {"content-type": "application/json", **headers},
        json.dumps({"error": {"message": f"no, {SECRET}"}}).encode(),
    )


class Endpoint:
    """Answers the i-th request with `script(i, request)`; remembers requests and how many were in flight at
    once."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Reply]):
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.busy = self.most_busy = 0
        self.url = ""


@contextmanager
def serving(script: Callable[[int, dict[str, Any]], Reply]) -> Iterator[Endpoint]:
    endpoint = Endpoint(script)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(endpoint.requests)
                endpoint.requests.append(request)
                endpoint.keys.append(self.headers["authorization"])
                endpoint.busy += 1
                endpoint.most_busy = max(endpoint.most_busy, endpoint.busy)
            try:
                status, headers, body = endpoint.script(number, request)
            finally:
                with lock:
                    endpoint.busy -= 1
            try:
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in (
                    [body] if "x-slow" not in headers else [body[i : i + 1] for i in range(len(body))]
                ):
                    self.wfile.write(piece)
                    time.sleep(0.1 if "x-slow" in headers else 0)
                if "content-length" in headers:  # longer than the body: the connection is cut
                    self.close_connection = True
            except ConnectionError:
                self.close_connection = True  # the client gave up waiting

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
