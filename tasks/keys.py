"""Reads keys and tokens from Prefect's secrets, for runs of deployments whose worker has no keys in its
environment.

A secret block is named after the variable, in lower case with dashes: `hf-token` for HF_TOKEN. A variable
that is already set takes precedence. Keys are in the environment of the flow's process while it runs, and its
stages inherit them. They never appear in parameters, files or logs (runs/launch.py masks them).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prefect.blocks.system import Secret

from rlhf_core.config import Recipe

AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def variables(recipe: Recipe) -> tuple[str, ...]:
    """Returns the environment variables that a recipe may need: the Hub's token, and keys for the store,
    W&B, judges, endpoints and rewards."""
    names = ["HF_TOKEN", *(AWS_KEYS if (recipe.store or "").startswith(("s3:", "s3a:")) else ())]
    names += ["WANDB_API_KEY"] if recipe.wandb else []
    names += [key.variable for config in recipe.stages.values() for key in config.needed_keys]
    return tuple(dict.fromkeys(names))


@contextmanager
def provided(names: Iterable[str]) -> Iterator[None]:
    """Sets each unset variable from the secret of the same name, if there is one, until the block ends."""
    found = {name: value for name in names if not os.environ.get(name) and (value := _secret(name))}
    os.environ.update(found)
    try:
        yield
    finally:
        for name in found:
            os.environ.pop(name, None)


def _secret(variable: str) -> str | None:
    """Returns the value of a secret block; None when there is none."""
    try:
        block = Secret.load(variable.lower().replace("_", "-"))
    except ValueError:  # Prefect raises it for an unknown block
        return None
    assert isinstance(block, Secret)  # not a coroutine, because no event loop runs here
    value = block.get()
    return str(value).strip() or None
