"""Finds the training commands in a script or in Kubernetes YAML, with their stage kind, flags and GPUs.

In YAML, scripts are found in ConfigMaps, in containers of any resource, and in the entrypoint of a RayJob.
Commands are also found inside `python -m`, `torchrun`, `torch.distributed.launch`, `deepspeed`, `ray job
submit`, `srun`, `bash -c` and `eval`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from rlhf_core.migrate.shell import Command, Remark, Script, Variables, read_script
from rlhf_core.migrate.trl_commands import KINDS as TRL_KINDS
from rlhf_core.migrate.trl_commands import TrlProgram, trl_launch, trl_program

# The module or file that a command starts, and the stage kind that it trains.
PROGRAMS = {
    "train_sft": "sft",
    "train_rm": "reward_model",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_ppo": "ppo",
    "train_ppo_ray": "ppo",
    "train_ppo_ray_optim": "ppo",
}
NOT_OURS = {
    "train_kd",
    "train_prm",
    "train_es_ray",
    "train_opd",
    "train_continue_pretrain",
    "train_grpo",
    "train_simpo",
    "train_orpo",
}
SAMPLING = "batch_inference"
STARTERS = re.compile(r"(.*/)?(python[\d.]*|deepspeed|torchrun|accelerate|-m|--module)")
SHELLS = {"bash", "sh", "zsh"}
MAX_DEPTH = 4  # nesting of scripts inside scripts


class Launch(NamedTuple):
    """A training command. `flags`: the words of each flag; `gpus`: (nodes, GPUs per node) from the launcher,
    None where not given."""

    kind: str
    flags: dict[str, tuple[str, ...]]
    line: int
    gpus: tuple[int | None, int | None]
    tool: Literal["openrlhf", "trl"] = "openrlhf"


class LaunchCommands(NamedTuple):
    """The training commands of a script, and remarks about the script."""

    launches: list[Launch]
    remarks: list[Remark]


def launches_of(text: str, folder: Path = Path()) -> LaunchCommands:
    """Returns the training commands in a file, in order. `folder`: the folder of config files that commands
    name.

    Raises ValueError for invalid YAML, an unclosed quote or bracket, or a TRL config that cannot be read.
    """
    variables = Variables()
    scripts = scripts_of(text, variables) if is_manifest(text) else [read_script(text, variables)]
    found = [launches_in(script, variables, folder) for script in scripts]
    return LaunchCommands(
        [launch for one in found for launch in one.launches],
        [remark for one in found for remark in one.remarks],
    )


def launches_in(
    script: Script, variables: Variables, folder: Path = Path(), depth: int = 0
) -> LaunchCommands:
    """Returns the training commands in a script, in order. `depth`: nesting of scripts inside scripts."""
    found = LaunchCommands([], list(script.remarks))
    for words, line in script.commands:
        inner = _inner_script(words) if depth < MAX_DEPTH else None
        place = _program(words)
        name = _name(words[place]) if place is not None else ""
        if inner is not None:
            more = launches_in(read_script(inner, variables, line), variables, folder, depth + 1)
            found.launches.extend(more.launches)
            found.remarks.extend(more.remarks)
        elif (program := trl_program(words)) is not None:
            _add_trl(found, words, program, line, folder)
        elif place is not None and name in PROGRAMS:
            found.launches.append(
                Launch(PROGRAMS[name], flags_of(words[place + 1 :]), line, _gpus(words[:place]))
            )
        elif name == SAMPLING:
            text = (
                f"{name} is left out: a stage `iterative_dpo` or `iterative` samples, scores and trains"
                " (docs/reference/algorithms.md)"
            )
            found.remarks.append(Remark(line, text))
        elif name:
            found.remarks.append(Remark(line, f"{name} has no counterpart here: the command is left out"))
    return found


def _add_trl(
    found: LaunchCommands, words: tuple[str, ...], program: TrlProgram, line: int, folder: Path
) -> None:
    """Adds a TRL command to the launches, or a remark that it was left out."""
    if program.name not in TRL_KINDS:
        found.remarks.append(
            Remark(line, f"trl {program.name} has no counterpart here: the command is left out")
        )
        return
    launcher = flags_of(words[: program.at])
    given = flags_of(words[program.at + 1 :])
    launched = trl_launch(words, program, given, launcher, folder, line)
    found.launches.append(Launch(TRL_KINDS[program.name], launched.options, line, launched.gpus, "trl"))
    found.remarks.extend(Remark(line, remark) for remark in launched.remarks)


def flags_of(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Parses `--flag value`, `--flag=value`, `--flag` and `--flag one two`. The last occurrence of a repeated
    flag counts; -1 is a value."""
    flags: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word == "\\" or not (word or name):
            continue
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = (value,) if equals else ()
        elif name:
            flags[name] = (*flags[name], word)
    return flags


def _inner_script(words: tuple[str, ...]) -> str | None:
    """Returns the script that `bash -c TEXT` or `eval TEXT` runs; None for other commands."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for at, word in enumerate(words):
        if word.rpartition("/")[2] in SHELLS:
            for option, text in zip(words[at + 1 :], words[at + 2 :], strict=False):
                if re.fullmatch(r"-[a-z]*c", option):
                    return text
                if not option.startswith("-") and option != "pipefail":
                    break
    return None


def _name(word: str) -> str:
    """Returns `train_sft` for `openrlhf.cli.train_sft` and for `../train_sft.py`."""
    return re.split(r"[./]", word.removesuffix(".py"))[-1]


def _program(words: tuple[str, ...]) -> int | None:
    """Returns the index of the program among the words of a training command; None for other commands."""
    started = False
    for at, word in enumerate(words):
        if _name(word) in PROGRAMS.keys() | NOT_OURS | {SAMPLING} and (at == 0 or started):
            return at
        started = started or STARTERS.fullmatch(word) is not None
        if word.startswith("--") and at and not started and "submit" not in words[:at]:
            return None
    return None


def _gpus(words: tuple[str, ...]) -> tuple[int | None, int | None]:
    """Returns (nodes, GPUs per node) from the flags of torchrun, torch.distributed.launch or deepspeed, None
    where not given."""
    flags = flags_of(words)

    def number(*names: str) -> int | None:
        given = [flags[name][0] for name in names if flags.get(name)]
        return int(given[0]) if given and re.fullmatch(r"[1-9]\d*", given[0]) else None

    per_node = number("nproc_per_node", "num_gpus", "num_processes")
    if per_node is None and (include := flags.get("include")) and "@" not in include[0]:
        devices = include[0].rpartition(":")[2]  # localhost:0,1,2
        per_node = len(devices.split(",")) if re.fullmatch(r"\d+(,\d+)*", devices) else None
    return number("nnodes", "num_nodes", "num_machines"), per_node


def is_manifest(text: str) -> bool:
    """Returns whether a file is Kubernetes YAML rather than a shell script, which may contain YAML in a
    heredoc."""
    first = next(
        (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---"))),
        "",
    )
    return (
        re.match(r"[A-Za-z]+:(\s|$)", first) is not None
        and re.search(r"^apiVersion:\s", text, re.M) is not None
    )


def scripts_of(text: str, variables: Variables) -> list[Script]:
    """Returns the scripts in a manifest, and stores the plain `env` values of its containers in `variables`.
    Raises ValueError for invalid YAML."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"the manifest is not plain YAML ({getattr(error, 'problem', error)},{where}): render its"
            " templates first"
        ) from None
    for container in _containers(documents):
        for entry in _listed(container.get("env")):
            if isinstance(entry, dict) and isinstance(entry.get("value"), str):
                variables[str(entry.get("name"))] = [entry["value"]]
    return [script for document in documents for script in _scripts_in(document, text, variables)]


def _scripts_in(document: dict[str, Any], text: str, variables: Variables) -> Iterator[Script]:
    if document.get("kind") == "ConfigMap":
        for body in (document.get("data") or {}).values():
            if isinstance(body, str) and "--" in body:
                yield read_script(body, variables, _line(text, body))
    spec = document.get("spec")
    entrypoint = spec.get("entrypoint") if isinstance(spec, dict) else None
    if isinstance(entrypoint, str):
        # may be written over several lines, with or without backslashes
        joined = re.sub(r"[ \t]*\\?\n[ \t]*(?=--)", " ", entrypoint)
        yield read_script(joined, variables, _line(text, entrypoint))
    for container in _containers(document):
        words = [str(word) for key in ("command", "args") for word in _listed(container.get(key))]
        words = [
            re.sub(r"\$\((\w+)\)", lambda m: " ".join(variables.get(m[1], [m[0]])), word) for word in words
        ]
        if words:
            yield Script([Command(tuple(words), _line(text, max(words, key=len)))])


def _containers(node: Any) -> Iterator[dict[str, Any]]:
    """Yields every container, at any depth of a resource."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                yield from (container for container in value if isinstance(container, dict))
            else:
                yield from _containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _line(text: str, body: str) -> int:
    """Returns the number of the manifest's line on which a string in it begins."""
    first = next((line.strip() for line in body.splitlines() if line.strip()), "")
    at = text.find(first)
    return text.count("\n", 0, at) + 1 if at >= 0 and first else 1
