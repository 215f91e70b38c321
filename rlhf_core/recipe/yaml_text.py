"""Parses YAML with differences from PyYAML's defaults: `5e-7` is a number (as in YAML 1.2), a key that appears twice is an error, and
aliases may not stand for more than MOST values, which would fill the memory."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import ConstructorError

MOST = 100_000


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # a date that there is not, a number of too many digits, a tag on other text
            text = repr(str(node.value)[:60])
            raise ConstructorError(None, None, f"{text} cannot be read as the date or number it looks like", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ConstructorError(None, None, "a key is a list or a mapping, and must be text", key_node.start_mark)
            if key in seen:
                raise ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def parse(text: str, where: str) -> Any:
    """Returns the value of a YAML text. Raises ValueError: one sentence that begins with `where`."""
    try:
        loader = _Loader(text)  # refuses control characters
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MOST:
            raise ValueError(f"holds more than {MOST:,} values, with those that its aliases (*name) stand for")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where}{line}: {error.problem}; correct the YAML") from None
    except RecursionError:
        raise ValueError(f"{where}: its brackets are nested too deeply to be read; correct the YAML") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # too many values; a tag on a value of another type
        raise ValueError(f"{where}: {str(error).splitlines()[0]}; correct the YAML") from None


def _size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Returns the number of values in a node, each alias counted as what it stands for; infinity for one that holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")
        values = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]  # a mapping has pairs
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]
