"""Runs a program on several gloo ranks, each a process of its own, as DeepSpeed takes a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rlhf_core.cluster.rank_environment import STORE, store_address

SECONDS = 300


def on_gloo_ranks(count: int, program: str, *arguments: object) -> list[str]:
    """Returns what each rank has printed. Raises AssertionError with the errors of the first rank that failed."""
    store, ranks = store_address(), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(count):
            environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), STORE: store}
            out, errors = (Path(folder, f"{name}{rank}").open("w+") for name in ("out", "errors"))
            command = [sys.executable, "-c", program, *map(str, arguments)]
            ranks.append((subprocess.Popen(command, env=environment, stdout=out, stderr=errors), out, errors))
        try:
            for process, _, errors in ranks:
                code = process.wait(SECONDS)
                errors.seek(0)
                assert code == 0, errors.read()[-3000:]
        finally:
            for process, _, errors in ranks:
                process.kill()
                process.wait()
                errors.close()
        printed = []
        for _, out, _ in ranks:
            out.seek(0)
            printed.append(out.read())
            out.close()
    return printed
