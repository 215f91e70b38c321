"""Finds the training commands of a script, with their stage kind, flags and GPUs.

Also inside of `python -m`, `torchrun`, `torch.distributed.launch`, `deepspeed`, `ray job submit`, `srun`, `bash -c` and `eval`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlhf_core.migrate.shell import Remark, Script, read_script
from rlhf_core.migrate.variables import Variables

# The module or file that a command starts, and the stage kind it trains.
PROGRAMS = {
    "train_sft": "sft",
    "train_rm": "reward_model",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_ppo": "ppo",
    "train_ppo_ray": "ppo",
    "train_ppo_ray_optim": "ppo",
    "batch_inference": "batch_inference",
}
NOT_OURS = {"train_kd", "train_prm", "train_es_ray", "train_opd", "train_continue_pretrain", "train_grpo", "train_simpo", "train_orpo"}
STARTERS = re.compile(r"(.*/)?(python[\d.]*|deepspeed|torchrun|accelerate|-m|--module)")
SHELLS = {"bash", "sh", "zsh"}
MAX_DEPTH = 4  # of scripts inside scripts


class Launch(NamedTuple):
    """One training command. `flags`: words by flag; `gpus`: (nodes, GPUs per node) of the launcher, None if not given."""

    kind: str
    flags: dict[str, tuple[str, ...]]
    line: int
    gpus: tuple[int | None, int | None]


class Found(NamedTuple):
    """The training commands of a script, and remarks about it."""

    launches: list[Launch]
    remarks: list[Remark]


def launches_in(script: Script, variables: Variables, depth: int = 0) -> Found:
    """Returns the training commands of a script, in order. `depth`: of scripts inside scripts."""
    found = Found([], list(script.remarks))
    for words, line in script.commands:
        inner = _inner_script(words) if depth < MAX_DEPTH else None
        if inner is not None:
            more = launches_in(read_script(inner, variables, line), variables, depth + 1)
            found.launches.extend(more.launches)
            found.remarks.extend(more.remarks)
            continue
        place = _program(words)
        if place is None:
            continue
        name = _name(words[place])
        if name in PROGRAMS:
            found.launches.append(Launch(PROGRAMS[name], flags_of(words[place + 1 :]), line, _gpus(words[:place])))
        else:
            found.remarks.append(Remark(line, f"{name} has no counterpart here: the command is left out"))
    return found


def flags_of(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Parses `--flag value`, `--flag=value`, `--flag` and `--flag one two`. A flag given twice has its last values; -1 is a value."""
    flags: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word in ("\\", ""):
            if not (word == "" and name):
                continue
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            head, dot, tail = name.replace("-", "_").rpartition(".")
            name = head + dot + tail
            flags[name] = (value,) if equals else ()
        elif name:
            flags[name] = (*flags[name], word)
    return flags


def _inner_script(words: tuple[str, ...]) -> str | None:
    """Returns the text that `bash -c TEXT` or `eval TEXT` runs; None for other commands."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for at, word in enumerate(words):
        if word.rpartition("/")[2] in SHELLS:
            for option, text in zip(words[at + 1 :], words[at + 2 :], strict=False):
                if re.fullmatch(r"-[a-z]*c", option):
                    return text
                if not option.startswith("-") and option not in ("pipefail",):
                    break
    return None


def _name(word: str) -> str:
    """Returns `train_sft` for `openrlhf.cli.train_sft` and for `../train_sft.py`."""
    return re.split(r"[./]", word.removesuffix(".py"))[-1]


def _program(words: tuple[str, ...]) -> int | None:
    """Returns the index of the program among the words of a training command; None for other commands."""
    for at, word in enumerate(words):
        if word.startswith("--") and at and not any(STARTERS.fullmatch(w) for w in words[: at + 1]) and "submit" not in words[:at]:
            return None
        if _name(word) in PROGRAMS.keys() | NOT_OURS and (at == 0 or any(STARTERS.fullmatch(before) for before in words[:at])):
            return at
    return None


def _gpus(words: tuple[str, ...]) -> tuple[int | None, int | None]:
    """Returns nodes and GPUs per node from the flags of torchrun, torch.distributed.launch or deepspeed; None if not given."""
    flags = flags_of(words)

    def number(*names: str) -> int | None:
        given = [flags[name][0] for name in names if flags.get(name)]
        return int(given[0]) if given and re.fullmatch(r"[1-9]\d*", given[0]) else None

    per_node = number("nproc_per_node", "num_gpus", "num_processes")
    if per_node is None and (include := flags.get("include")) and "@" not in include[0]:
        devices = include[0].rpartition(":")[2]  # localhost:0,1,2
        per_node = len(devices.split(",")) if re.fullmatch(r"\d+(,\d+)*", devices) else None
    return number("nnodes", "num_nodes", "num_machines"), per_node
