"""Checks whether this machine has what a recipe needs: CPUs, GPUs, packages, keys, the store and the
artifacts folder. Does not check memory."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import (
    AlignmentTax,
    EngineConfig,
    Ranks,
    StageConfig,
)
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.environments.sandbox import available
from rlhf_core.preflight.server_checks import missing_keys
from rlhf_core.preflight.verifier_problems import verifier_needs
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.rollout.vllm.patches.table import installed_release, untested
from rlhf_core.runs.remote.remote_files import StoreFault
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.remote.wandb_mirror import KEY_ENV, MODE_ENV
from rlhf_core.system.machine import MachineLacks as MachineLacks  # re-exported for callers of the checks
from rlhf_core.system.machine import num_cpus, num_gpus


class Needs(NamedTuple):
    """Holds the largest number of CPUs, GPUs and nodes that a stage uses at once."""

    cpus: float
    gpus: float
    nodes: int


def needs(config: StageConfig) -> Needs:
    """Returns the CPUs, GPUs and nodes that a stage needs at the same time: for PPO for all roles and
    engines, for other stages for the ranks or engines."""
    layouts = [arrange(groups, config.together) for groups in config.turns]
    sums = [
        {resource: sum(b.get(resource, 0.0) for b in layout.bundles) for resource in ("CPU", "GPU")}
        for layout in layouts
    ]
    nodes = (
        group.num_nodes for groups in config.turns for group in groups.values() if isinstance(group, Ranks)
    )
    return Needs(
        max(found["CPU"] for found in sums), max(found["GPU"] for found in sums), max(nodes, default=1)
    )


def check_machine(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Returns what this machine lacks: CPUs, GPUs, packages, keys, access to the store and the artifacts
    folder."""
    problems = (
        _folder_problem(plan.artifacts) + _webhook_problem(plan) + _store_problem(plan) + _wandb_problem(plan)
    )
    cpus = num_cpus()
    gpus = num_gpus()
    cluster = os.environ.get("RAY_ADDRESS")
    for node in nodes:
        if node.done:
            continue
        need = needs(node.config)
        where = f"stages.{node.name}"
        if not cluster:
            if need.nodes > 1:
                problems.append(
                    f"{where} asks for {need.nodes} nodes, this is one machine; set RAY_ADDRESS to a cluster"
                    " or num_nodes to 1"
                )
            if need.cpus > cpus + 1e-6:
                problems.append(
                    f"{where} asks for {need.cpus:g} CPUs in all, this machine has {cpus}; lower ranks or"
                    " cpus of its roles"
                )
            if need.gpus > gpus + 1e-6:
                problems.append(
                    f"{where} asks for {need.gpus:g} GPUs in all, this machine has {gpus}; lower ranks or"
                    " gpus of its roles"
                )
        problems += _quantisation_problem(node, gpus) if not cluster else []
        problems += _sandbox_problem(node)
        problems += verifier_needs(node)
        problems += missing_keys(node)
        for key in node.config.needed_keys:
            if key.required and not os.environ.get(key.variable):
                problems.append(
                    f"{where}: {key.reader} needs a key in the environment variable {key.variable}; set it"
                )
        groups = [group for turn in node.config.turns for group in turn.values()]
        if any(isinstance(group, EngineConfig) and group.kind == "vllm" for group in groups):
            problems += filter(None, [untested(installed_release())])
        if isinstance(node.config, AlignmentTax) and importlib.util.find_spec("lm_eval") is None:
            problems.append(
                f"{where} needs the package lm_eval, which is not installed; install alignflow's extra `tax`"
            )
    return list(dict.fromkeys(problems))


def _store_problem(plan: Plan) -> list[str]:
    if plan.recipe.store is None:
        return []
    try:
        Store(plan.recipe.store, attempts=1).files.probe()
    except StoreFault as fault:
        return [str(fault)]
    return []


def _wandb_problem(plan: Plan) -> list[str]:
    if plan.recipe.wandb is None:
        return []
    package = importlib.util.find_spec("wandb")
    # A folder `wandb` that the client created has no origin; the installed package has one.
    if package is None or package.origin is None:
        return [
            "wandb: the package wandb is not installed; install alignflow's extra `wandb`, or leave wandb out"
            " of the recipe"
        ]
    if not os.environ.get(KEY_ENV) and os.environ.get(MODE_ENV) not in ("offline", "disabled"):
        return [
            f"wandb: the environment variable {KEY_ENV} is empty; set it, or set {MODE_ENV}=offline to send"
            " the metrics later"
        ]
    return []


def _webhook_problem(plan: Plan) -> list[str]:
    notify = plan.recipe.notify
    if notify is None or notify.url is not None:
        return []
    return [
        f"notify: the environment variable {notify.url_env} holds no http(s) address; set it, or leave"
        " notify out"
    ]


def _quantisation_problem(node: Node, gpus: float) -> list[str]:
    """Returns a sentence for each of QLoRA's requirements, a GPU and the package bitsandbytes, that this
    machine lacks."""
    lora = getattr(node.config, "lora", None)
    if lora is None or lora.quantize == "none":
        return []
    where = f"stages.{node.name}.lora.quantize={lora.quantize}"
    if not gpus:
        return [f"{where} needs an NVIDIA GPU, and this machine has none; set it to none"]
    if importlib.util.find_spec("bitsandbytes") is None:
        return [
            f"{where} needs the package bitsandbytes, which is not installed; install it or set quantize to"
            " none"
        ]
    return []


def _sandbox_problem(node: Node) -> list[str]:
    """Returns a sentence for each `tools` environment whose programs cannot be sandboxed."""
    return [
        f"stages.{node.name}.{place} runs programs in bubblewrap (bwrap), which does not work on this"
        " machine; install it (Debian, Ubuntu: apt-get install bubblewrap), leave python out of"
        " options.tools, or set sandbox to none, which closes nothing in"
        for place, environment in node.config.talks_to.items()
        if _needs_sandbox(environment) and not available()
    ]


def _needs_sandbox(environment: Environment) -> bool:
    """Returns whether this is a `tools` environment whose programs run in the sandbox."""
    if environment.own or environment.sandbox == "none" or environment.path != "tools":
        return False
    return "python" in (environment.options.get("tools") or ("python",))


def _folder_problem(folder: Path) -> list[str]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return []
    except OSError as error:
        return [
            f"artifacts: nothing can be written to {existing} ({error.strerror}); set artifacts to another"
            " folder"
        ]
