"""Looks for the scalar head of a reward model in the headers of safetensors files. Torch-free."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.hub.model_files import tensors_of

HEADS = ("score.weight", "base_model.model.score.weight")  # of a model, of an adapter


def no_reward_head(place: str) -> str:
    """Returns the message for a model at `place` that is no reward model."""
    return (
        f"{place} has no trained head for one score (a tensor score.weight of shape [1, hidden size]), so its rewards would mean nothing: "
        f"name a reward model, as a reward_model stage makes it"
    )


def has_scalar_head(folder: Path) -> bool:
    """Whether a tensor of the folder's safetensors is a head for one score. Raises OSError or ValueError for files that cannot be read."""
    shapes = [about["shape"] for file in folder.glob("*.safetensors") for name, about in tensors_of(file).items() if name in HEADS]
    return any(shape[0] == 1 for shape in shapes)
