"""A reward model behind HTTP, with the contract of `rewards/contract.py`: `alignflow serve-reward CHECKPOINT --port PORT`.

POST (any path) takes `prompts`, `responses` and, optional, `finished`; other lists are ignored. GET says what is served. One request is
scored at a time. Wrong input is 400 with a sentence, a failure of the model 500: the client retries what may pass.
Left out: authentication and TLS, which belong to a proxy in front; by default only this machine is listened to.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, NamedTuple

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Message
from rlhf_core.models.scoring import RewardScorer

LARGEST_REQUEST = 64 << 20  # bytes


class AnswerToScore(NamedTuple):
    """One answer to score."""

    prompt: list[Message]
    response: str
    finished: bool


def read_request(text: bytes) -> list[AnswerToScore]:
    """The answers of a request. ValueError says what is wrong with it."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("the request is no JSON") from None
    if not isinstance(body, dict) or not isinstance(body.get("prompts"), list) or not isinstance(body.get("responses"), list):
        raise ValueError("the request needs the lists prompts and responses")
    prompts, responses = body["prompts"], body["responses"]
    finished = body.get("finished", [True] * len(prompts))
    if not isinstance(finished, list) or not len(prompts) == len(responses) == len(finished):
        raise ValueError("prompts, responses and finished must be lists of one length")
    return [AnswerToScore(_messages(p), _text(r), bool(f)) for p, r, f in zip(prompts, responses, finished, strict=True)]


def document(renderer: Renderer, answer: AnswerToScore) -> Document:
    """Prompt and answer as a sampler would have made them: an answer cut by length has no end token."""
    whole = renderer.answer(answer.prompt, answer.response)
    return whole if answer.finished else whole.cut(len(whole) - 1)


def reward_server(
    checkpoint: str, host: str, port: int, template: str = "chat", micro_batch_size: int = 8, trust_remote_code: bool = False
) -> ThreadingHTTPServer:
    """A server ready to `serve_forever`; port 0 takes a free one. ValueError when the checkpoint or its tokenizer cannot be used."""
    renderer = Renderer(load_tokenizer(checkpoint, trust_remote_code), template)
    scorer = RewardScorer(checkpoint, "auto", micro_batch_size, trust_remote_code)
    lock = Lock()

    def score(answers: Sequence[AnswerToScore]) -> list[float]:
        with lock:
            return scorer.score([document(renderer, answer) for answer in answers])

    return ThreadingHTTPServer((host, port), handler(score, {"model": checkpoint, "template": template}))


def handler(score: Callable[[Sequence[AnswerToScore]], list[float]], about: dict[str, Any]) -> type[BaseHTTPRequestHandler]:
    """The HTTP side of a scoring function."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60  # seconds a client may take to send its request

        def do_GET(self) -> None:
            self._send(200, about)

        def do_POST(self) -> None:
            length = self.headers.get("content-length", "")
            if not length.isdigit() or int(length) > LARGEST_REQUEST:
                self.close_connection = True
                return self._send(413, {"error": f"the request needs a content-length of at most {LARGEST_REQUEST} bytes"})
            try:
                answers = read_request(self.rfile.read(int(length)))
                rewards = score(answers)
            except ValueError as error:
                return self._send(400, {"error": str(error)})
            except Exception:
                traceback.print_exc()
                return self._send(500, {"error": "the model failed; see the server's log"})
            self._send(200, {"rewards": [reward if math.isfinite(reward) else None for reward in rewards]})

        def _send(self, status: int, reply: dict[str, Any]) -> None:
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged: a rollout makes thousands."""

    return Handler


def _messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    valid = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and set(m) >= {"role", "content"} for m in prompt)
    if not valid:
        raise ValueError("a prompt is a string or a list of messages with role and content")
    return [{"role": _text(message["role"]), "content": _text(message["content"])} for message in prompt]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a response, role or content must be a string, not {type(value).__name__}")
    return value
