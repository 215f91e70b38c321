"""Trains a stage on a set larger than the memory it may allocate: `python streamed_training.py KIND MODEL
FOLDER [in-memory]`.

A first, small run loads all libraries and makes the allocator's pools. From then on the process may allocate
ALLOWED more (RLIMIT_DATA, which counts private memory that can be written to, and no mapped files), half as
much again as model, optimiser and plot were seen to take, and the second run reads a set of which the files
alone are larger than that. It trains a few steps and then reads every item once, in the order of an epoch.
With `in-memory` the items are put in a list instead, as a check of the limit. Prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any

from tests.support.stage_request import stage_request

ROWS = {"sft": 40_000, "dpo": 30_000}
WORDS = 100
MAX_LEN = 600
BATCH = 4
STEPS = 4
ALLOWED = {"sft": 48 * 2**20, "dpo": 64 * 2**20}
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


class Enough(Exception):
    """The steps to be shown are done."""


def write_rows(file: Path, kind: str, count: int) -> None:
    rng = random.Random(0)

    def text() -> str:
        return " ".join(str(rng.randrange(10**4)) for _ in range(WORDS))

    with file.open("w") as out:
        for _ in range(count):
            row = (
                {"prompt": "Sort: 1 2", "response": text()}
                if kind == "sft"
                else {"prompt": "Sort: 1 2", "chosen": text(), "rejected": text()}
            )
            out.write(json.dumps(row) + "\n")


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def private_bytes() -> int:
    """What RLIMIT_DATA counts."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")
    )
    return int(line.split()[1]) * 1024


def main(kind: str, model: str, folder: Path, in_memory: bool) -> None:
    import rlhf_core.stages.dpo
    import rlhf_core.stages.sft
    from rlhf_core.config import DPO, SFT, Data
    from rlhf_core.runs.run_dir import STATE, RunDir
    from rlhf_core.training.engine import TorchEngine
    from rlhf_core.training.train_loop import order_of_epoch

    module: Any = rlhf_core.stages.sft if kind == "sft" else rlhf_core.stages.dpo
    common = {"max_len": MAX_LEN, "train_batch_size": BATCH, "micro_train_batch_size": 1}
    loader = "sft_documents" if kind == "sft" else "preference_pairs"
    load = getattr(module, loader)
    step = TorchEngine.step
    taken = []
    seen = []

    def remember(*arguments: Any) -> Any:
        loaded = load(*arguments)
        seen.append(list(loaded.items) if in_memory else loaded.items)
        return loaded._replace(items=seen[-1])

    def stop(self: TorchEngine, rate: float) -> float:
        taken.append(step(self, rate))
        if len(taken) == STEPS:
            raise Enough
        return taken[-1]

    setattr(module, loader, remember)
    TorchEngine.step = stop  # type: ignore[method-assign]
    for name, count in (("small", STEPS * BATCH), ("large", ROWS[kind])):
        taken.clear()
        seen.clear()
        gc.collect()
        run = folder / name
        run.mkdir(parents=True)
        write_rows(folder / f"{name}.jsonl", kind, count)
        data = Data.model_validate({"sources": str(folder / f"{name}.jsonl")})
        config = (
            SFT(model="base", data=data, **common)
            if kind == "sft"
            else DPO(policy="base", data=data, loss="simpo", **common)
        )
        if name == "large":
            limit = private_bytes() + ALLOWED[kind]
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            module.train(
                stage_request(config, model, name=kind),
                RunDir(run),
            )
        except Enough:
            pass
        tokens = sum(
            len(item if kind == "sft" else item.chosen)
            for item in (seen[-1][i] for i in order_of_epoch(count, 0, 0))
        )
    stored = size(folder / "large" / STATE)
    told = dict(steps=len(taken), tokens=tokens, stored_mib=stored / 2**20, allowed_mib=ALLOWED[kind] / 2**20)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), "in-memory" in sys.argv[4:])
