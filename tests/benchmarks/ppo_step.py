"""Times PPO iterations on random weights and fixed lengths: every model and vLLM on the GPUs of this machine.

    python tests/benchmarks/ppo_step.py --model FOLDER --out FOLDER --placement one --prompts 128 --prompt-len
    256 --generate-len 512

FOLDER of --model holds a transformers checkpoint with a tokenizer (random weights do). Prints what `alignflow
plan` foretells and, for each step, the seconds of each phase beside its floor (operations and bytes at the
ceilings measured on the card), the share of the step in which each role waits, and the peak memory of each
card so far, all processes together. A reward of no meaning is added to the reward model's, whose head starts
at zero where there is none: gradients are not zero, and the weights that travel change. The first step's
losses compare placements with each other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openrlhf_ppo
import verl_ppo
from gpu_memory import in_gib, watch_memory
from headed import headed
from openrlhf_ppo import run_child
from record import add_options, figure, save

from rlhf_core.config import PPO
from rlhf_core.config.former_names import stage_with_new_names
from rlhf_core.forecast.hardware import GPUS, Gpu
from rlhf_core.forecast.placements import choose, forecast, placements
from rlhf_core.hub.model_config import size_of
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

LETTERS = """
def letters(responses):
    return [sum(map(ord, response)) % 101 / 50 - 1 for response in responses]
"""
ROLES = ("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks")
PEERS = {"openrlhf": openrlhf_ppo, "verl": verl_ppo}


def cards(count: int) -> dict[str, Any]:
    return {"num_ranks_per_node": count, "gpus": 1}


# The GPUs of each role. `one`: everything on one card in fractions; `all-N`: on the same N cards, an engine
# each; `tp-2`: one engine over both cards; `tp-8`, `tp-4-4`: one engine over eight cards, two over four each;
# `split-2`: the models on a card, the engine on another; `split-3`, `split-4`: pairs of models on cards of
# their own; `split-6`, `split-8`: pairs of models on two cards each, and two engines of one card or of two;
# `ahead-4`: actor and reference on two cards, two engines on two others.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one": {
        **{role: {"gpus": 0.15} for role in ROLES},
        "engine": {"gpus": 0.3, "gpu_memory_utilization": 0.3},
    },
    **{
        f"all-{n}": {
            **dict.fromkeys(ROLES, cards(n)),
            "colocate_all": True,
            "engine": {"num_engines": n, "gpus": 1, "gpu_memory_utilization": 0.45, "sleep": True},
        }
        for n in (1, 2, 4, 8)
    },
    **{
        f"split-{4 + 2 * size}": {
            **dict.fromkeys(ROLES, cards(2)),
            "colocate_actor_ref": True,
            "colocate_critic_reward": True,
            "engine": {"num_engines": 2, "tensor_parallel_size": size, "gpus": 1},
        }
        for size in (1, 2)
    },
    "ahead-4": {
        **dict.fromkeys(ROLES, cards(2)),
        "colocate_actor_ref": True,
        "engine": {"num_engines": 2, "gpus": 1},
    },
    **{
        name: {
            **dict.fromkeys(ROLES, cards(8)),
            "colocate_all": True,
            "engine": {
                "num_engines": engines,
                "tensor_parallel_size": 8 // engines,
                "gpus": 1,
                "gpu_memory_utilization": 0.45,
                "sleep": True,
            },
        }
        for name, engines in (("tp-8", 1), ("tp-4-4", 2))
    },
    "split-4": {
        **dict.fromkeys(ROLES[:1] + ROLES[2:3], cards(2)),
        **dict.fromkeys(ROLES[1:2] + ROLES[3:], cards(1)),
        "colocate_actor_ref": True,
        "colocate_critic_reward": True,
        "engine": {"gpus": 1},
    },
    "split-3": {
        **dict.fromkeys(ROLES, cards(1)),
        "colocate_actor_ref": True,
        "colocate_critic_reward": True,
        "engine": {"gpus": 1},
    },
    "split-2": {**{role: {"gpus": 0.25} for role in ROLES}, "engine": {"gpus": 1}},
    "tp-2": {
        **dict.fromkeys(ROLES, cards(2)),
        "colocate_all": True,
        "engine": dict(
            num_engines=1, tensor_parallel_size=2, gpus=1, gpu_memory_utilization=0.45, sleep=True
        ),
    },
}


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of a run's size and placement."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--placement",
        choices=[*PLACEMENTS, "plan"],
        default="one",
        help="plan: what `alignflow plan` chooses on one GPU",
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="for what the plan says")
    parser.add_argument(
        "--set",
        default="{}",
        help="JSON of more settings of the stage; 'engine' is merged, 'reward' names models",
    )
    parser.add_argument(
        "--no-critic", action="store_true", help="REINFORCE: actor, reference and reward model alone"
    )
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--generate-len", type=int, default=512)
    parser.add_argument("--micro-tokens", type=int, default=24576, help="tokens of a pass")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--zero-stage", type=lambda stage: stage if stage == "auto" else int(stage), default="auto"
    )
    parser.add_argument(
        "--recompute", type=float, default=1.0, help="share of the layers with gradient checkpointing"
    )
    return parser


def command_line() -> argparse.ArgumentParser:
    """The options of this command."""
    parser = options(__doc__)
    parser.add_argument(
        "--peer",
        nargs="?",
        const="openrlhf",
        choices=PEERS,
        help="afterwards the same work in OpenRLHF or verl, where it is installed, and the ratios",
    )
    parser.add_argument(
        "--peer-seconds", type=int, default=900, help="then the peer is cut off; steps that ended count"
    )
    add_options(parser, "ppo-step")
    return parser


def main() -> None:
    arguments = command_line().parse_args()
    arguments.out.mkdir(parents=True)
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    prompts = [
        "".join(rng.choice(letters) for _ in range(arguments.prompt_len))
        for _ in range(arguments.prompts * arguments.steps)
    ]
    (arguments.out / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    config = stage_config(arguments)
    card = GPUS[arguments.gpu]
    if arguments.placement == "plan":
        config = chosen(config, arguments.model, card)
    print(f"plan {json.dumps(foretold(config, arguments.model, card))}", flush=True)
    run = RunDir(arguments.out / "run")
    scored = str(headed(arguments.model, arguments.out / "rm"))
    inputs = {"base": str(arguments.model), "rm": scored, "other": scored}  # other: a second reward model
    run.prepare(stage_request(config, inputs))
    peaks = watch_memory()
    start = time.time()
    ended = threading.Event()
    watcher = threading.Thread(target=show_steps, args=(run.path, start, peaks, ended), daemon=True)
    watcher.start()
    code = run_child("-m", "rlhf_core", str(run.path))
    ended.set()
    watcher.join()
    lines = read_metrics(run.path)
    print(f"exit code {code} after {time.time() - start:.0f} s; peak GiB by card {in_gib(peaks)}", flush=True)
    title = f"PPO step, placement {arguments.placement}"
    measured = figures(lines, start, peaks) if lines else {}
    if measured:
        save(arguments, title, measured)
    if arguments.peer:
        theirs = beside(lines, arguments)
        shared = {name: seconds for name, seconds in theirs.items() if name in measured}
        if shared:
            save(arguments, title, measured, {"name": arguments.peer, "figures": shared})
    sys.exit(code)


def figures(lines: list[dict[str, float]], start: float, peaks: list[int]) -> dict[str, dict[str, Any]]:
    """What a record holds: the last step with its phases, seconds to the first rollout, the fullest GPU, the
    sampler gap."""
    phases = {
        name: lines[-1][f"phase/{name}"]
        for name in ("generate", "score", "train", "sync")
        if f"phase/{name}" in lines[-1]
    }
    seconds = {
        "step": total(lines[-1]),
        **phases,
        "first rollout": lines[0]["time"] - total(lines[0]) - start,
    }
    found = {name: figure(round(value, 2), "s") for name, value in seconds.items()}
    if peaks:
        found["peak"] = figure(max(in_gib(peaks)), "GiB")
    return found | {"sampler gap": figure(round(lines[-1]["sampler/gap"], 4), "nats")}


def beside(lines: list[dict[str, float]], arguments: argparse.Namespace) -> dict[str, float]:
    """Runs the peer on as many cards and prints the last step of both, and the last but one, with their
    ratios; returns the seconds of the peer's last step, by phase, if one ended."""
    peer = PEERS[arguments.peer]
    why = peer.missing()
    if why:
        print(why)
        return {}
    theirs, unfinished = peer.run(
        arguments, int(arguments.placement.rpartition("-")[2]) if "-" in arguments.placement else 1
    )
    print(f"the peer ended {len(theirs)} steps, of {[step['step'] for step in theirs]} s")
    if lines and unfinished:
        ours = total(lines[-1])
        print(
            f"its step that did not end had taken {unfinished:.0f} s, {unfinished / ours:.1f} times our last"
            f" one of {ours:.1f} s"
        )
    for back in range(1, min(3, len(lines) + 1, len(theirs) + 1)):
        ours = {name: lines[-back].get(f"phase/{name}", 0.0) for name in peer.PHASES}
        ours["step"] = total(lines[-back])
        print(
            f"steps {len(lines) - back + 1} of ours and {len(theirs) - back + 1} of the peer's: seconds, and"
            " the peer's by ours"
        )
        for name, seconds in ours.items():
            other = theirs[-back].get(name, float("nan"))
            print(f"  {name:9} {seconds:7.2f} {other:7.2f} {other / max(seconds, 1e-9):6.2f}")
    return theirs[-1] if theirs else {}


def stage_config(arguments: argparse.Namespace) -> PPO:
    """The stage that the options of the command describe."""
    (arguments.out / "letters.py").write_text(LETTERS)
    settings = stage_with_new_names(json.loads(arguments.set))
    placement = PLACEMENTS["one" if arguments.placement == "plan" else arguments.placement]
    return PPO.model_validate(
        {
            "actor": "base",
            "prompts": {"sources": str(arguments.out / "prompts.jsonl"), "template": "{}"},
            "dtype": "bfloat16",
            "advantage_estimator": "reinforce_pp" if arguments.no_critic else "gae",
            "zero_stage": arguments.zero_stage,
            "rollout_batch_size": arguments.prompts,
            "train_batch_size": min(128, arguments.prompts),
            "micro_train_batch_size": 1,
            "micro_rollout_batch_size": 1,
            "micro_train_tokens": arguments.micro_tokens,
            "micro_rollout_tokens": arguments.micro_tokens,
            "max_steps": arguments.steps,
            "prompt_max_len": arguments.prompt_len,
            "generate_max_len": arguments.generate_len,
            "gradient_checkpointing": arguments.recompute,
            **placement,
            **settings,
            "reward": [
                *settings.get("reward", ["rm"]),
                {"function": f"{arguments.out / 'letters.py'}:letters"},
            ],
            "engine": placement["engine"] | settings.get("engine", {}),
        }
    )


def chosen(config: PPO, model: Path, card: Gpu) -> PPO:
    """The stage as `alignflow plan` would have it on one card."""
    best = choose(placements(config, 1, dict.fromkeys(config.groups, size_of(str(model))), card), card)
    if best is None:
        sys.exit("no placement fits")
    print(f"chosen: {best.name} {json.dumps(best.fields)}", flush=True)
    return PPO.model_validate(config.model_dump() | best.fields)


def foretold(config: PPO, model: Path, card: Gpu) -> dict[str, Any]:
    """What `alignflow plan` says: GiB of each kind of card, seconds of a step by phase."""
    plan = forecast("", config, {}, dict.fromkeys(config.groups, size_of(str(model))), card)
    seconds = {"step": plan.total, **plan.seconds}
    return {
        "GiB": in_gib([held for _, held in plan.gpus.values()]),
        **{name: round(value, 2) for name, value in seconds.items()},
    }


def show_steps(run: Path, start: float, peaks: list[int], ended: threading.Event) -> None:
    """Prints each step when it is there, until the run has ended."""
    shown = 0
    last = False
    while not last:
        last = ended.wait(1.0)
        lines = read_metrics(run)
        for line in lines[shown:]:
            if not shown:
                print(f"command to first rollout: {line['time'] - total(line) - start:.0f} s")
            show(line)
            print(f"    peak GiB by card so far {in_gib(peaks)}", flush=True)
            shown += 1


def total(line: dict[str, float]) -> float:
    """Seconds of a step, all of its phases."""
    return sum(value for name, value in line.items() if name.startswith("phase/"))


def show(line: dict[str, float]) -> None:
    def named(prefix: str) -> dict[str, float]:
        return {
            name.removeprefix(prefix): round(value, 2)
            for name, value in line.items()
            if name.startswith(prefix)
        }

    phases = named("phase/")
    floor = named("floor/")
    told = "  ".join(
        f"{name} {value}" + (f" (floor {floor[name]})" if name in floor else "")
        for name, value in phases.items()
    )
    checks = (
        "response/length",
        "sampler/gap",
        "sampler/gap_p99",
        "policy/first_ratio",
        "policy/first_ratio_gap",
        "policy/grad_norm",
        "sync/probe_gap",
        "policy/loss",
        "value/loss",
    )
    print(f"step {line['step']}  {total(line):.1f} s  {told}")
    for title, said in (("work", named("work/")), ("wait", named("wait/")), ("GiB", named("memory/"))):
        print(f"    {title} {said}")
    print(f"    { ({name: round(line[name], 6) for name in checks if name in line}) }")


if __name__ == "__main__":
    main()
