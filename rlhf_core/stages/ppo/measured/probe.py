"""Compares the log-probs of engines and trainer on the same tokens and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# A difference |log-prob of engine - log-prob of trainer| on the same weights that is always allowed.
NOISE_FREE = {"float32": 1e-3, "float16": 3e-3, "bfloat16": 0.02}
MARGIN = 4.0  # largest allowed difference, as a multiple of the change that rounding causes in the log-probs


class WeightsDiffer(RuntimeError):
    """Raised when the sampler's log-probs differ from the trainer's after a weight sync."""


class EngineDiffers(RuntimeError):
    """Raised when the sampler's log-probs differ from the trainer's on the same checkpoint, before any weight
    sync."""


class Probe(NamedTuple):
    """Holds the largest absolute difference of log-probs between engines and trainer, and its bound. For
    experts in bf16, both cover nine of ten tokens."""

    gap: float
    bound: float


def gaps_of(found: Sequence[Any], expected: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the absolute differences of log-probs over all documents, except at each document's first
    token, which has no log-prob."""
    return np.concatenate(
        [np.abs(np.asarray(got) - want)[1:] for got, want in zip(found, expected, strict=True)]
    )


def compare(
    engines: Sequence[Sequence[Any]],
    plain: Sequence[np.ndarray],
    moved: Sequence[np.ndarray],
    dtype: str,
    most: bool,
) -> Probe:
    """Returns the largest gap between any engine's log-probs and the trainer's (`plain`), and its bound. The
    bound is `MARGIN` times the change that rounding in both formats causes in the trainer's own log-probs
    (`moved`: `rounding.py`), and at least `NOISE_FREE`. With `most`, gap and bound cover only nine of ten
    tokens."""
    gaps = np.concatenate([gaps_of(engine, plain) for engine in engines])
    if not len(gaps):  # prompts of one token give nothing to compare
        return Probe(0.0, 0.0)
    of_rounding, gap = (
        float(np.quantile(each, 0.9) if most else each.max()) for each in (gaps_of(moved, plain), gaps)
    )
    return Probe(gap, max(NOISE_FREE[dtype], MARGIN * of_rounding))


def check_gap(gap: float, tolerance: float, most: bool = False, synced: bool = True) -> None:
    """Raises an error if log-probs of engine and trainer differ by more than `tolerance` or are nan. The
    error is WeightsDiffer after a weight sync (`synced`) and EngineDiffers before the first. With `most`, the
    gap covers only nine of ten tokens."""
    if gap <= tolerance:
        return
    differ = (
        "the engine's log-probs differ from the trainer's by up to"
        f" {gap:.3g}{' at nine of ten tokens' if most else ''} (allowed {tolerance:.3g})"
    )
    if synced:
        raise WeightsDiffer(f"after a weight sync {differ}: the engine does not hold the actor's weights")
    raise EngineDiffers(
        f"before any weight sync {differ}, both on the checkpoint of the actor: the engine computes the model"
        " in another way than the trainer does, no weight sync is at fault; install a version of vLLM that"
        " supports the model, or set engine.kind to transformers"
    )
