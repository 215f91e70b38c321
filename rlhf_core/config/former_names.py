"""Reads the names that fields had before: `vllm` is `engine` now, and its `engine` is `options`."""

from __future__ import annotations

from typing import Any

NOTE = "vllm is called engine now, and vllm.engine is engine.options: rename them"


def with_new_names(given: Any) -> Any:
    """Returns parsed YAML or JSON with today's names, at any depth. What has both names is left as it is."""
    if isinstance(given, list | tuple):
        return [with_new_names(item) for item in given]
    if not isinstance(given, dict):
        return given
    named = {key: with_new_names(value) for key, value in given.items()}
    if isinstance(named.get("vllm"), dict) and "engine" not in named:
        options = named.pop("vllm")
        if "engine" in options:
            options["options"] = options.pop("engine")
        named["engine"] = options
    return named


def with_new_keys(keys: list[str], value: Any) -> tuple[list[str], Any]:
    """Returns the keys of an override, a stage's name first, and its value with today's names."""
    if "vllm" not in keys[1:]:
        return keys, value
    place = keys.index("vllm", 1)
    below = keys[place + 1 :]
    if not below:
        value = with_new_names({"vllm": value}).get("engine", value)
    elif below[0] == "engine":
        below = ["options", *below[1:]]
    return [*keys[:place], "engine", *below], value
