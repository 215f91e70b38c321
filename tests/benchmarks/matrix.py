"""A PPO run for each option of placement, side by side on the cards of one host, and their table: seconds by
phase, memory by card.

    python tests/benchmarks/matrix.py --model FOLDER --out FOLDER [--steps 2] [--gpus 4] [--rows ROW ...]

FOLDER of --model holds a transformers checkpoint with a tokenizer (random weights do). Each row is
ppo_step.py with its placement, on cards of its own; a row starts as soon as as many cards are free as it
needs. Rows that work at the same time share the host's processors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf_ppo import start_child
from ppo_step import ROLES
from record import add_options, figure, save

from rlhf_core.runs.metrics_log import read_metrics

PHASES = ("generate", "score", "train", "sync")
HEAD = (
    "",
    "step",
    *PHASES,
    "step by `plan`",
    "peak GiB by card",
    "peak by `plan`",
    "first policy and value loss",
)


class Row(NamedTuple):
    """A placement of ppo_step.py, the settings that make the row, and the cards that it needs."""

    placement: str
    settings: dict[str, Any]
    cards: int
    zero_stage: int | str = "auto"


HALF = {"gpus": 0.5}
BESIDE = {"gpus": 0.5, "gpu_memory_utilization": 0.35}  # an engine that shares its card
ROWS = {
    "one card, fractions": Row("one", {}, 1),
    "all on one card, the engine sleeps": Row("all-1", {}, 1),
    "and reference and reward offloaded": Row("all-1", {"ref_reward_offload": True}, 1),
    "and Adam of actor and critic on the host": Row("all-1", {"adam_offload": ["actor", "critic"]}, 1),
    "models on a card, the engine on another": Row("split-2", {}, 2),
    "and two reward models": Row(
        "split-2", {"reward": ["rm", "other"], **{role: {"gpus": 0.2} for role in ROLES}}, 2
    ),
    "actor + reference; critic, reward, engine": Row(
        "split-2", {"colocate_actor_ref": True, "engine": BESIDE}, 2
    ),
    "critic + reward; actor, reference, engine": Row(
        "split-2", {"colocate_critic_reward": True, "engine": BESIDE}, 2
    ),
    "all on two cards, two engines": Row("all-2", {}, 2, 3),
    "all on two cards, an engine over both (TP 2)": Row("tp-2", {}, 2, 3),
    "actor + reference, critic + reward, engine": Row("split-3", {}, 3),
    "actor + reference, critic, reward, engine": Row("split-3", {"colocate_critic_reward": False}, 4),
    "actor, reference, critic + reward, engine": Row("split-3", {"colocate_actor_ref": False}, 4),
    "actor, critic, reference and reward halves, engine": Row(
        "split-3",
        dict(colocate_actor_ref=False, colocate_critic_reward=False, reference_ranks=HALF, reward_ranks=HALF),
        4,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--options", default="", help="more of ppo_step.py, for all rows")
    add_options(parser, "matrix")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    waiting = [name for name in arguments.rows if ROWS[name].cards <= arguments.gpus]
    running = {}
    for name in set(arguments.rows) - set(waiting):
        print(f"left out, for want of cards: {name} ({ROWS[name].cards})")
    free = set(range(arguments.gpus))
    found: dict[str, dict[str, Any]] = {}
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    while waiting or running:
        for name in [name for name in waiting if ROWS[name].cards <= len(free)][:1]:
            taken = sorted(free)[: ROWS[name].cards]
            free -= set(taken)
            waiting.remove(name)
            running[name] = taken, begin(name, taken, arguments)
        for name, (taken, process) in [
            (name, row) for name, row in running.items() if row[1].poll() is not None
        ]:
            print(told(name, taken, arguments.out, process.returncode), flush=True)
            if not process.returncode and (lines := read_metrics(arguments.out / slug(name) / "run")):
                found[name] = figure(
                    round(sum(value for key, value in lines[-1].items() if key.startswith("phase/")), 2), "s"
                )
            free |= set(taken)
            del running[name]
        time.sleep(1)
    save(arguments, "Seconds of a PPO step by placement", found)


def begin(name: str, taken: list[int], arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    row = ROWS[name]
    script = str(Path(__file__).with_name("ppo_step.py"))
    out = str(arguments.out / slug(name))
    settings = [
        "--placement",
        row.placement,
        "--set",
        json.dumps(row.settings),
        "--zero-stage",
        str(row.zero_stage),
    ]
    given = [
        "--model",
        str(arguments.model),
        "--out",
        out,
        "--steps",
        str(arguments.steps),
        *arguments.options.split(),
    ]
    with (arguments.out / f"{slug(name)}.txt").open("wb") as log:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))}
        return start_child(script, *settings, *given, stdout=log, stderr=log, env=environment)


def told(name: str, taken: list[int], out: Path, code: int) -> str:
    """A line of the table: the last step's seconds, the peaks of its cards."""
    text = (out / f"{slug(name)}.txt").read_text(errors="replace")
    lines = read_metrics(out / slug(name) / "run")
    if code or not lines:
        said = [line for line in text.splitlines() if line.strip() and not line.startswith("exit code")]
        return f"| {name} | ended with code {code}: {said[-1] if said else 'nothing was said'} |||||||||"
    peaks = json.loads(re.findall(r"peak GiB by card (\[.*\])", text)[-1])
    plan = json.loads(re.findall(r"^plan (.*)$", text, re.MULTILINE)[0])
    phases = {
        key.removeprefix("phase/"): value for key, value in lines[-1].items() if key.startswith("phase/")
    }
    seconds = " | ".join(f"{phases[phase]:.2f}" for phase in PHASES)
    losses = ", ".join(f"{lines[0][loss]:.6f}" for loss in ("policy/loss", "value/loss"))
    memory = f"{', '.join(str(peaks[i]) for i in taken)} | {', '.join(map(str, plan['GiB']))}"
    return f"| {name} | {sum(phases.values()):.1f} | {seconds} | {plan['step']:.1f} | {memory} | {losses} |"


def slug(name: str) -> str:
    """The name of the row's folder."""
    return f"{list(ROWS).index(name)}-" + re.sub(r"\W+", "-", name)


if __name__ == "__main__":
    main()
