"""Runs a program on several gloo ranks, each a process of its own, as DeepSpeed takes a process.

The ranks are forks of one process that has imported the libraries, so that these are imported once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rlhf_core.cluster.rank_environment import STORE, store_address

SECONDS = 300
FORKS = """
import gc, os, signal, sys, traceback
import deepspeed, torch, transformers
import rlhf_core.training.ranks
program, count, folder, *sys.argv[1:] = sys.argv[1:]
gc.freeze()
ranks = [str(rank) for rank in range(int(count))]
for rank in ranks:
    if os.fork() == 0:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        for number, name in ((1, "out"), (2, "errors")):
            os.dup2(os.open(f"{folder}/{name}{rank}", os.O_CREAT | os.O_WRONLY), number)
        try:
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
for _ in ranks:
    if os.wait()[1]:
        os.killpg(0, signal.SIGKILL)  # the others would wait for it
"""


def on_gloo_ranks(count: int, program: str, *arguments: object) -> list[str]:
    """Returns what each rank has printed. Raises AssertionError with the errors of the first rank that
    failed."""
    environment = os.environ | {"WORLD_SIZE": str(count), STORE: store_address()}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", FORKS, program, str(count), folder, *map(str, arguments)]
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, told = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        errors = [file.read_text() for file in sorted(Path(folder).glob("errors*"))]
        assert process.returncode == 0, next((text for text in errors if "Traceback" in text), told)[-3000:]
        return [Path(folder, f"out{rank}").read_text() for rank in range(count)]
