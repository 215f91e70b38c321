"""What judging costs above the latency of the endpoint: games against a local mock endpoint over real HTTP.

    python tests/benchmarks/judging.py [--games 1000] [--latency 0.2] [--concurrency 64] [--limit 5]

The ideal is ceil(games / concurrency) x latency. The endpoint is a process of its own, so that it takes no
time from the judge's. Exit code 1 when the time above the ideal exceeds the limit. Not a test: it measures,
and a busy machine would fail it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from record import add_options, figure, save

from evaluation.judges.chat_judge import LlmJudge
from evaluation.judges.offline import Match
from rlhf_core import config as configs
from rlhf_core.data.questions import Question
from rlhf_core.judging.chat_client import ChatClient, remote

ANSWER = "word " * 300  # of about the length of a real one


def serve(latency: float, port: Connection) -> None:
    """Answers every POST with a verdict after `latency` seconds; keeps connections open."""
    message = {"role": "assistant", "content": "A does more of what was asked. [[A>B]]"}
    usage = {"prompt_tokens": 900, "completion_tokens": 12, "total_tokens": 912}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = json.dumps(
        dict(id="1", object="chat.completion", created=0, model="m", choices=[choice], usage=usage)
    ).encode()
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                await asyncio.sleep(latency)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def main() -> int:
    parser = argparse.ArgumentParser(description="time of judging above the ideal")
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=0.2, help="seconds")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds above the ideal that are allowed")
    add_options(parser, "judging")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(options.latency, theirs), daemon=True
    )
    server.start()
    try:
        if not ours.poll(60):
            raise SystemExit("the mock endpoint did not start within 60 s")
        url = f"http://127.0.0.1:{ours.recv()}/v1"
        questions = [
            Question(f"q{n}", "hard_prompt", ({"role": "user", "content": f"Question {n}"},), {})
            for n in range(options.games)
        ]
        with tempfile.TemporaryDirectory() as folder:
            limits = configs.Remote(
                model="mock",
                base_url=url,
                api_key_env="NO_KEY",
                concurrency=options.concurrency,
                timeout=30.0,
                max_attempts=3,
            )
            client = ChatClient(
                "judge mock", "mock", lambda: remote(limits), {"max_tokens": 64, "temperature": 0}, limits
            )
            judge = LlmJudge("mock", client, Path(folder) / "cache.jsonl", "mock", 0.0)
            start = time.perf_counter()
            busy = time.process_time()
            games = judge.judge([Match(question, ANSWER, ANSWER + question.uid) for question in questions])
            seconds = time.perf_counter() - start
            busy = time.process_time() - busy
    finally:
        server.kill()
        server.join()
    assert len(games) == options.games and all(game.score == "A>B" for game in games)
    ideal = math.ceil(options.games / options.concurrency) * options.latency
    above = seconds - ideal
    print(
        f"{options.games} games in {seconds:.2f} s, ideal {ideal:.2f} s, above it {above:.2f} s (limit"
        f" {options.limit:g} s)"
    )
    print(
        f"own processor time {busy:.2f} s: on an idle machine the time above the ideal is at most about that"
    )
    figures = {"whole": figure(round(seconds, 2), "s"), "above the ideal": figure(round(above, 2), "s")}
    save(
        options, f"{options.games:,} games against a mock endpoint of {1e3 * options.latency:.0f} ms", figures
    )
    return int(above > options.limit)


if __name__ == "__main__":
    sys.exit(main())
