"""Compares vLLM's log-probs of a fixed probe with the trainer's, and says whether the engine or the weight sync is at fault."""

from __future__ import annotations

PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}  # largest |log-prob difference| of vLLM and trainer on the same weights


class WeightsDiffer(RuntimeError):
    """After a weight sync the sampler's log-probs are not the trainer's."""


class EngineDiffers(RuntimeError):
    """Of the same checkpoint, before any weight sync, the sampler's log-probs are not the trainer's."""


def check_gap(gap: float, tolerance: float, most: bool = False, synced: bool = True) -> None:
    """Raises an error when log-probs of engine and trainer differ by more than `tolerance` (or are nan); `most`: at nine of ten tokens.
    WeightsDiffer after a weight sync (`synced`), EngineDiffers before any."""
    if gap <= tolerance:
        return
    differ = (
        f"vLLM's log-probs differ from the trainer's by up to {gap:.3g}{' at nine of ten tokens' if most else ''} (allowed {tolerance:g})"
    )
    if synced:
        raise WeightsDiffer(f"after a weight sync {differ}: the engine does not hold the actor's weights")
    raise EngineDiffers(
        f"before any training {differ}, both on the checkpoint of the actor: this version of vLLM computes the model in another way than "
        "transformers does, no weight sync is at fault; install a version of vLLM that supports the model, or train another one"
    )
