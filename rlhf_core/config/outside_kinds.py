"""Reads the stage kinds that other installed packages add through entry points of the group
`alignflow.stages`: docs/how-to/own-stages.md."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points

from rlhf_core.config.gates import Gated
from rlhf_core.config.kinds import Kind

GROUP = "alignflow.stages"

UNUSABLE: dict[str, str] = {}  # kind name -> why its entry point is left out


def kinds_of_packages(known: Collection[str]) -> dict[str, Kind]:
    """Returns the kinds from installed packages by name. `known`: names already taken.

    An unusable entry point is left out, so that other recipes still run. `UNUSABLE` holds the reason, which
    is reported by `alignflow doctor` and by the check of a recipe that names the kind.
    """
    kinds: dict[str, Kind] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            kinds[point.name] = _kind_of(point, (*known, *kinds))
        except Exception as error:
            told = " ".join(str(error).split()) or type(error).__name__
            UNUSABLE[point.name] = (
                f"the stage kind {point.name} of {_package(point)} ({point.value}) cannot be used: {told}"
            )
    return kinds


def _kind_of(point: EntryPoint, known: Collection[str]) -> Kind:
    """Loads an entry point. Raises ValueError if it is not a usable `Kind`, and any error that its module
    raises."""
    if point.name in known:
        raise ValueError("a kind of this name exists; choose another name")
    kind = point.load()
    if not isinstance(kind, Kind):
        raise ValueError(f"it is a {type(kind).__name__}, not an rlhf_core.config.kinds.Kind")
    if not (isinstance(kind.config, type) and issubclass(kind.config, Gated)):
        raise ValueError("its config class must inherit from rlhf_core.config.gates.Gated")
    taken = _taken(kind.config)
    if taken:
        raise ValueError(
            f"the field {taken[0]} of {kind.config.__name__} has the name of an attribute of every stage"
            " (rlhf_core.config.gates.Gated): give it another name"
        )
    if kind.config.model_fields["stage"].default != point.name:
        raise ValueError(f"the field `stage` of {kind.config.__name__} must have the default {point.name!r}")
    if not kind.module:
        raise ValueError("it does not name a module with `run(request, run)`")
    return kind


def _taken(config: type[Gated]) -> list[str]:
    """Returns the fields that a property or method of the same name would hide."""
    bases = [base for base in config.__mro__ if issubclass(base, Gated)]
    return [name for name in config.model_fields if any(name in vars(base) for base in bases)]


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name}" if point.dist else "a package"
