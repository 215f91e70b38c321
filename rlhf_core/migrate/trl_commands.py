"""Finds TRL's commands among the words of a script, and joins their options with the options in a YAML config
(`--config`).

Leaves out TRL trainers in Python code, and TRL commands for which no kind of stage exists.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Options = dict[str, tuple[str, ...]]
KINDS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward_model", "grpo": "ppo"}
NO_STAGE = {
    *(
        "rloo",
        "distillation",
        "gkd",
        "gold",
        "ppo",
        "online_dpo",
        "orpo",
        "cpo",
        "bco",
        "prm",
        "xpo",
        "nash_md",
        "reward_modeling",
    ),
    *("vllm-serve", "vllm_serve", "env", "chat"),
}
SCRIPT = re.compile(r"(?:.*[/.])?scripts[/.]([\w-]+?)(?:\.py)?")
LAUNCHERS = re.compile(r"(?:.*/)?(?:accelerate|torchrun|deepspeed|trl)")
ZERO = re.compile(r"zero_?([123])")
COUNTS = {  # options of launchers -> accelerate's names for them
    "num_machines": "num_machines",
    "nnodes": "num_machines",
    "num_processes": "num_processes",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
}
SIGNS = {  # options that only one command has
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eos_token"),
    "dpo": ("label_smoothing", "precompute_ref_log_probs", "max_prompt_length", "rpo_alpha", "use_weighting"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "grpo": (
        "num_generations",
        "max_completion_length",
        "reward_funcs",
        "use_vllm",
        "num_iterations",
        "epsilon",
    ),
}


class TrlProgram(NamedTuple):
    """A command among the words of a line. `at`: the index of its last word, after which its options
    begin."""

    name: str
    at: int


class TrlLaunch(NamedTuple):
    """The settings of a TRL command. `options`: its options, including the options in its config, and
    `zero_stage` from the launcher's config; `gpus`: (nodes, processes per node), None where not given."""

    options: Options
    gpus: tuple[int | None, int | None]
    remarks: list[str]


def trl_program(words: tuple[str, ...]) -> TrlProgram | None:
    """Returns the TRL command that a line starts: `trl NAME`, or a TRL script run by python or a launcher.
    Otherwise returns None."""
    started = False
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word.rpartition("/")[2] == "trl" and following in KINDS.keys() | NO_STAGE:
            return TrlProgram(following, at + 1)
        script = SCRIPT.fullmatch(word)
        if (
            started
            and not word.startswith("-")
            and script is not None
            and script[1] in KINDS.keys() | NO_STAGE
        ):
            return TrlProgram(script[1], at)
        started = (
            started or re.fullmatch(r"(.*/)?(python[\d.]*|accelerate|torchrun|deepspeed)", word) is not None
        )
    return None


def trl_launch(
    words: tuple[str, ...], program: TrlProgram, given: Options, launcher: Options, folder: Path, line: int
) -> TrlLaunch:
    """Returns the options of a command together with the options in its config, and the settings in its
    launcher's options and config. The options in `given`, from the command line, override the config.

    Raises ValueError for a config that cannot be read.
    """
    options = dict(given)
    remarks = []
    config = options.pop("config", None)
    if config:
        content = _mapping(folder, config[0] if config else "", f"line {line} of the script: the config")
        if content.pop("env", None):
            remarks.append("the variables of env in the config are left out: set them where alignflow runs")
        options = options_of(content) | options
    accelerate = options.pop("accelerate_config", None) or launcher.get("config_file")
    launched: dict[str, Any] = {}
    if accelerate:
        launched = _accelerate(folder, accelerate[0], remarks)
    stage = launched.get("zero_stage")
    if stage and "zero_stage" not in options:
        options["zero_stage"] = (str(stage),)
    for name, own in COUNTS.items():
        for place in (launcher, options):
            if place.get(name):
                launched[own] = place[name][0]
        options.pop(name, None)
    alone = not any(LAUNCHERS.fullmatch(word) for word in words[: program.at + 1])
    return TrlLaunch(options, _gpus(launched, alone, "nproc_per_node" in launcher), remarks)


def options_of(config: dict[str, Any]) -> Options:
    """Returns the options in a YAML config as command-line words."""
    return {str(name): _words(value) for name, value in config.items()}


def trl_config(text: str, name: str) -> tuple[str, Options] | None:
    """Returns the command for which a TRL YAML file is written, and its options; None for any other file.

    Raises ValueError if the options suit several commands and the file's `name` does not name one.
    """
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if (
        not isinstance(content, dict)
        or "model_name_or_path" not in content
        or not {"dataset_name", "datasets"} & content.keys()
    ):
        return None
    content.pop("env", None)
    named = [kind for kind in KINDS if re.search(rf"(^|[^a-z]){kind}([^a-z]|$)", name.lower())]
    shown = [kind for kind, signs in SIGNS.items() if any(sign in content for sign in signs)]
    kinds = shown if len(shown) == 1 else named
    if len(kinds) != 1:
        raise ValueError(
            "it is a config of TRL that does not say for which command: give a script with the line `trl sft"
            " --config FILE`, with dpo, kto, reward or grpo in place of sft"
        )
    return kinds[0], options_of(content)


def refuse_python(text: str, suffix: str) -> None:
    """Raises ValueError for a Python script, because its trainer cannot be read without executing the
    script."""
    if suffix == ".py" or re.search(r"^\s*(from trl[. ]|import trl\b)", text, re.M):
        raise ValueError(
            "it is a Python script, and only commands are read: give the shell script that starts the"
            " training (for TRL `trl sft|dpo|kto|reward|grpo ...`), its YAML config, or write the recipe by"
            " docs/tutorial/own-model.md"
        )


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(json.dumps(each) if isinstance(each, dict) else str(each) for each in value)
    return (json.dumps(value) if isinstance(value, dict) else str(value),)


def _mapping(folder: Path, name: str, what: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load((folder / name).read_text())
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is no YAML"
        raise ValueError(
            f"{what} {name} cannot be read ({reason}): put it beside the script, under this path"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{what} {name} holds no options, one `name: value` a line: correct it")
    return content


def _accelerate(folder: Path, name: str, remarks: list[str]) -> dict[str, Any]:
    """Returns processes, machines and the ZeRO stage from accelerate's config or, if the file is missing, the
    values that its name reveals."""
    try:
        content = _mapping(folder, name, "the config")
    except ValueError:
        remarks.append(
            f"accelerate's config {name} is not beside the script: only what its name says is read, set ranks"
            " and zero_stage"
        )
        zero = ZERO.search(name)
        found: dict[str, Any] = {"zero_stage": zero[1]} if zero else {}
        return found | ({"num_processes": 1} if "single_gpu" in name else {})
    found = {key: content[key] for key in ("num_processes", "num_machines") if content.get(key)}
    deepspeed = content.get("deepspeed_config")
    if isinstance(deepspeed, dict) and deepspeed.get("zero_stage"):
        found["zero_stage"] = deepspeed["zero_stage"]
    elif str(content.get("distributed_type")).upper() == "FSDP":
        found["zero_stage"] = 3
    return found


def _gpus(launched: dict[str, Any], alone: bool, per_node: bool) -> tuple[int | None, int | None]:
    """Returns (nodes, processes per node); a number is None if it is not given. accelerate counts the
    processes of all machines, torchrun (`per_node`) the processes of one machine."""

    def number(name: str) -> int | None:
        value = str(launched.get(name, ""))
        return int(value) if re.fullmatch(r"[1-9]\d*", value) else None

    machines = number("num_machines")
    processes = number("num_processes")
    if processes is None:
        return machines, 1 if alone else None
    return machines, processes if per_node else max(1, processes // (machines or 1))
