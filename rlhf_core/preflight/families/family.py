"""Tries the model class of an untested family in a separate process. Finds errors that would otherwise appear
only after hours, and describes each in one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from rlhf_core.config import KINDS, EngineConfig, Optimised, Rewarded
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import TESTED, text_config
from rlhf_core.recipe.plan import Node
from rlhf_core.system.files import read_json
from rlhf_core.system.processes import child_environment

SECONDS = 180.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
SAMPLING = "sampling"
OPTIONS = "options of the engine"
DEEPSPEED = "options of DeepSpeed"  # a use for which `place` holds options instead of a model
MARK = "TRIAL "


StartOf = Callable[[Node, str], str | None]  # the folder or Hub id that a named model starts from


def family_problems(nodes: Sequence[Node], start_of: StartOf, trust_remote_code: bool = False) -> list[str]:
    """Returns a sentence for each local model of an untested family that cannot be used as its stage
    requires."""
    asked: dict[tuple[str, str], str] = {}
    for node in nodes:
        for field, name, use in _uses(node):
            place = start_of(node, name)
            if (
                place is not None
                and not is_remote(place)
                and (kind := _model_type(place))
                and kind not in TESTED
            ):
                asked.setdefault((place, use), f"stages.{node.name}.{field}")
    return _problems(asked, trust_remote_code)


def option_problems(nodes: Sequence[Node]) -> list[str]:
    """Returns a sentence for each engine or DeepSpeed option that the installed version does not support."""
    asked: dict[tuple[str, str], str] = {}
    for node in nodes:
        for name, wanted in (
            (name, wanted) for groups in node.config.turns for name, wanted in groups.items()
        ):
            if isinstance(wanted, EngineConfig) and wanted.options and wanted.kind == "vllm":
                owner = "" if name == "sampler" else f"{name}: "
                options = json.dumps(wanted.options, sort_keys=True, default=str)
                asked.setdefault((options, OPTIONS), f"stages.{node.name}.{owner}engine.options")
        if isinstance(node.config, Optimised) and node.config.deepspeed:
            asked.setdefault(
                (json.dumps(node.config.deepspeed, sort_keys=True, default=str), DEEPSPEED),
                f"stages.{node.name}.deepspeed",
            )
    return _problems(asked, trust_remote_code=False)


def _problems(asked: Mapping[tuple[str, str], str], trust_remote_code: bool) -> list[str]:
    told = (
        _ask(tuple((place, use, _changed(place)) for place, use in asked), trust_remote_code) if asked else ()
    )
    return [
        f"{where}: {line}"
        for where, lines in zip(asked.values(), told, strict=False)
        for line in lines.splitlines()
    ]


def _uses(node: Node) -> Iterator[tuple[str, str, str]]:
    """Yields (field, model name, use) for each model that the stage trains or samples."""
    config = node.config
    start = KINDS[node.kind].start
    if isinstance(config, Optimised):
        yield (
            start,
            getattr(config, start),
            "reward model" if KINDS[node.kind].makes == "reward" else "policy",
        )
        if getattr(config, "lora", None) is not None:
            yield start, getattr(config, start), "adapters"
    scored = KINDS[node.kind].scored
    if scored not in ("", start) and getattr(config, scored) is not None:
        yield scored, getattr(config, scored), "reward model"
    sampler = config.turns[0].get("sampler")
    if isinstance(sampler, EngineConfig) and sampler.kind == "vllm":
        yield from ((field, name, SAMPLING) for field, name in config.answering)
    for judge in config.own_judges if isinstance(config, Rewarded) else ():
        if judge.model.kind == "vllm":
            yield f"{judge.place}.model", judge.model.model, SAMPLING


def _model_type(place: str) -> str:
    return str(text_config(read_json(Path(place) / "config.json")).get("model_type") or "")


def _changed(place: str) -> int:
    with contextlib.suppress(OSError):
        return (Path(place) / "config.json").stat().st_mtime_ns
    return 0


@cache
def _ask(asked: tuple[tuple[str, str, int], ...], trust_remote_code: bool) -> tuple[str, ...]:
    """Runs `main` in a separate process and returns one answer per request, "" for no problem. If the process
    ends early, leaves out the answers to the remaining requests."""
    module = "rlhf_core.preflight.families.family"
    command = [sys.executable, "-P", "-m", module, *["trust"] * trust_remote_code]
    environment = child_environment() | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS, env=environment
        )
        return tuple(
            json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)
        )
    return ()


def _problem(place: str, use: str, trust_remote_code: bool) -> str:
    if use == OPTIONS:
        from rlhf_core.rollout.vllm.environment import unknown_option

        return unknown_option(json.loads(place))
    if use == DEEPSPEED:
        from rlhf_core.training.backends import unknown_zero_options

        return "\n".join(unknown_zero_options(json.loads(place)))
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # an unknown family, or values that its class rejects
        return f"{place}: {' '.join(str(error).split())[:200]}"
    if use == SAMPLING:
        from rlhf_core.rollout.vllm.environment import no_class_for

        return f"{place}: {told}" if (told := no_class_for((config.architectures or [""])[0])) else ""
    from rlhf_core.preflight.families.family_trial import try_family

    return try_family(config, place, use, trust_remote_code).problem  # type: ignore[arg-type]


def main() -> None:
    """Reads a JSON list of [place, use, ...] from standard input. Writes one line per item: its problem, or
    "" if there is none."""
    os.environ.update(ENVIRONMENT)
    for place, use, _ in json.load(sys.stdin):
        print(MARK + json.dumps(_problem(place, use, sys.argv[1:] == ["trust"])), flush=True)


if __name__ == "__main__":
    main()
