"""Seconds to bring changed weights from the actor's ranks to the engines, alone: a PPO fleet is started,
trained for a step, and synced.

    python tests/benchmarks/sync.py --model FOLDER --out FOLDER --placement split-2 --rounds 5

Placements and options are those of ppo_step.py. Before each sync the actor takes an optimiser step, so the
largest difference of log-probs between engines and actor is shown before (old weights) and after (new ones):
only a sync that arrived brings it down. Also printed: the route, GB/s, and by how many GiB each card's memory
rises meanwhile.
"""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from gpu_memory import watch_memory
from headed import headed
from ppo_step import options, stage_config
from record import add_options, figure, save
from transformers import AutoConfig

from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.measured.probe import WeightsDiffer
from rlhf_core.stages.ppo.ppo_setup import model_paths
from rlhf_core.stages.ppo.ppo_stage import start_processes
from rlhf_core.stages.ppo.roles.trained import Update
from rlhf_core.stages.ppo.rollout_records import Experience
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.start_fleet import start_fleet


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rate", type=float, default=1e-4, help="learning rate of the steps between the syncs"
    )
    add_options(parser, "sync")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    (arguments.out / "prompts.jsonl").write_text(json.dumps({"prompt": "not read"}) + "\n")
    config = stage_config(arguments)
    paths = model_paths(
        config, {"base": str(arguments.model), "rm": str(headed(arguments.model, arguments.out / "rm"))}
    )
    groups = start_processes(config)
    engines = RolloutGroup(config, groups["sampler"], groups["actor"])
    fleet = start_fleet(config, paths, load_tokenizer(paths["actor"], False), 0, groups, engines, False)
    size = weight_bytes(arguments.model, 2 if config.dtype == "bfloat16" else 4)
    peaks = watch_memory() if torch.cuda.is_available() else []
    experience = made_up(AutoConfig.from_pretrained(arguments.model).vocab_size, arguments.generate_len)
    documents = [item.document for item in experience]
    for number in range(arguments.rounds + 1):
        fleet.train(experience, {"actor": [Update(list(range(len(experience))), arguments.rate, 0.0)]})
        if fleet.sleeps:
            fleet.wake_engines()
        before = gap(fleet, documents)
        time.sleep(1)
        at_rest = list(peaks)
        start = time.monotonic()
        engines.sync_weights()
        seconds = time.monotonic() - start
        rise = [round((peak - rest) / 2**30, 2) for peak, rest in zip(peaks, at_rest, strict=True)]
        print(
            f"sync {number}: {seconds:.3f} s, {size / seconds / 1e9:.3g} GB/s of {size / 1e9:.3g} GB; "
            f"largest log-prob gap {before:.4f} -> {gap(fleet, documents):.4f}; GiB more on each card {rise}",
            flush=True,
        )
        if fleet.sleeps:
            engines.sleep(keep_weights=True)  # the next round looks at them before they are sent again
    figures = {"sync": figure(round(seconds, 3), "s"), "extra memory": figure(max(rise, default=0.0), "GiB")}
    save(arguments, f"Weight sync, placement {arguments.placement}, last round", figures)


def gap(fleet: Fleet, documents: list[Document]) -> float:
    """Largest |difference| of log-probs, also where it is beyond what a run allows."""
    try:
        return fleet.probe(documents).gap
    except WeightsDiffer as error:
        return float(str(error).split("up to ")[1].split()[0])


def made_up(vocabulary: int, length: int) -> list[Experience]:
    """Answers of random tokens, each as probable as the others, and random advantages: one step of the actor
    moves its weights."""
    rng = random.Random(0)
    numbers = np.random.default_rng(0)
    zeros = np.zeros(length, np.float32)
    even = np.full(length, -math.log(vocabulary), np.float32)
    made = []
    for _ in range(8):
        document = Document(
            [rng.randrange(vocabulary) for _ in range(length)], [False] + [True] * (length - 1)
        )
        advantages = numbers.normal(size=length).astype(np.float32)
        made.append(Experience(document, even, even, even, zeros, advantages, advantages))
    return made


def weight_bytes(folder: Path, each: int) -> int:
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())
    return total * each


if __name__ == "__main__":
    main()
