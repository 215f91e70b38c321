"""Finds scripts inside Kubernetes YAML: in ConfigMaps, containers of any resource, and the entrypoint of a RayJob."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from rlhf_core.migrate.shell import Command, Script, read_script
from rlhf_core.migrate.variables import Variables


def is_manifest(text: str) -> bool:
    """Returns whether a file is Kubernetes YAML, not a shell script, which may contain some in a heredoc."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---"))), "")
    return re.match(r"[A-Za-z]+:(\s|$)", first) is not None and re.search(r"^apiVersion:\s", text, re.M) is not None


def scripts_of(text: str, variables: Variables) -> list[Script]:
    """Returns the scripts of a manifest, and sets the plain `env` of its containers in `variables`. Raises ValueError for wrong YAML."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"the manifest is not plain YAML ({getattr(error, 'problem', error)},{where}): render its templates first"
        ) from None
    for container in _containers(documents):
        for entry in _listed(container.get("env")):
            if isinstance(entry, dict) and isinstance(entry.get("value"), str):
                variables.values[str(entry.get("name"))] = entry["value"]
    return [script for document in documents for script in _scripts_in(document, text, variables)]


def _scripts_in(document: dict[str, Any], text: str, variables: Variables) -> Iterator[Script]:
    if document.get("kind") == "ConfigMap":
        for body in (document.get("data") or {}).values():
            if isinstance(body, str) and "--" in body:
                yield read_script(body, variables, _line(text, body))
    spec = document.get("spec")
    entrypoint = spec.get("entrypoint") if isinstance(spec, dict) else None
    if isinstance(entrypoint, str):
        joined = re.sub(r"[ \t]*\\?\n[ \t]*(?=--)", " ", entrypoint)  # written over several lines, with or without backslashes
        yield read_script(joined, variables, _line(text, entrypoint))
    for container in _containers(document):
        words = [str(word) for key in ("command", "args") for word in _listed(container.get(key))]
        words = [re.sub(r"\$\((\w+)\)", lambda m: variables.text(m[1]) or m[0], word) for word in words]
        if words:
            yield Script([Command(tuple(words), _line(text, max(words, key=len)))])


def _containers(node: Any) -> Iterator[dict[str, Any]]:
    """Yields every container, at any depth of a resource."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                yield from (container for container in value if isinstance(container, dict))
            else:
                yield from _containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _line(text: str, body: str) -> int:
    """Returns the line of the manifest on which a text in it begins."""
    first = next((line.strip() for line in body.splitlines() if line.strip()), "")
    at = text.find(first)
    return text.count("\n", 0, at) + 1 if at >= 0 and first else 1
