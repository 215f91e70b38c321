"""Checks rollouts with images through vLLM on this machine, and prints what differs from the trainer.

python tests/benchmarks/pictured_rollouts.py --out FOLDER [--families qwen3_vl gemma3 ...]

Small float32 models, each in a process of its own: the largest difference of a log-prob between trainer and
engine, before and after a sync, in nats; whether another image with the same tokens changes log-probs. Exits
with 1 if a difference is too large.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config import EngineConfig
from rlhf_core.data.documents import compact
from rlhf_core.data.pictures.picture_source import PictureSource
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import SampledAnswer
from rlhf_core.rollout.engine_kinds import open_engine
from tests.support.pictured_models import PICTURED, make_pictured, square
from tests.unit.rollout.test_pictured_sampling import HOW, Asked

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FAMILIES = ("qwen3_vl", "mistral3", "gemma4", "gemma3") if ON_GPU else ("qwen3_vl", "mistral3")
LARGEST = 1e-4  # nats, in float32
# vLLM's processor of Gemma 3 looks for these tokens, which releases have.
LINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")


def compare(family: str, folder: Path) -> dict[str, Any]:
    """Returns the largest differences between engine and trainer for a small model of the family."""
    if family == "gemma3":
        PICTURED[family] = PICTURED[family]._replace(tokens=(*PICTURED[family].tokens, *LINES))
    asked = Asked(make_pictured(family, folder))
    trained, reader = asked.policy()
    trained.to(DEVICE)
    torch.backends.cudnn.allow_tf32 = False  # of the trainer's patches

    @torch.no_grad()
    def expected(i: int, answer: SampledAnswer) -> torch.Tensor:
        document = compact(asked.prompts[i], answer.tokens, pictures=asked.pictures[i])
        batch = collate([[document]], 0, reader=reader).to(DEVICE)
        return masked_logprobs(trained, batch).logprobs[batch.mask].cpu()

    def gap(groups: list[list[SampledAnswer]]) -> float:
        differences = [
            torch.tensor(answer.logprobs) - expected(i, answer)
            for i, group in enumerate(groups)
            for answer in group
        ]
        return float(torch.cat(differences).abs().max())

    config = EngineConfig(gpu_memory_utilization=0.2, kv_cache_gib=0.5, options={"max_num_seqs": 8})
    with closing(open_engine(str(asked.folder), config, seed=0, max_model_len=256, pictures=True)) as engine:
        seeds = [3, 5, 7]
        found: dict[str, Any] = {"family": family}
        found["before"] = gap(engine.generate(asked.prompts, seeds, HOW, asked.pictures))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
        weights = checkpoint_weights(trained.model, lambda parameters: nullcontext())
        engine.update(weights)  # type: ignore[attr-defined]
        found["after"] = gap(engine.generate(asked.prompts, seeds, HOW, asked.pictures))
        probed = []
        for colour in ("red", "blue", "red"):
            own = [
                picture._replace(source=PictureSource(data=square(colour))) for picture in asked.pictures[0]
            ]
            probed.append(engine.prompt_logprobs([asked.prompts[0]], [tuple(own)])[0])
    same = max(abs(a - b) for a, b in zip(probed[0], probed[2], strict=True))
    other = max(abs(a - b) for a, b in zip(probed[0], probed[1], strict=True))
    found |= {"same_image": same, "other_image": other}
    found["ok"] = max(found["before"], found["after"], same) < LARGEST < other
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--family", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.family:
        found = compare(arguments.family, arguments.out / arguments.family)
        print(json.dumps(found), flush=True)
        return 0 if found["ok"] else 1
    failed = False
    for family in arguments.families:
        command = [sys.executable, __file__, "--out", str(arguments.out), "--family", family]
        failed |= subprocess.run(command, env=dict(os.environ), check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
