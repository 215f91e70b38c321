"""Parses YAML with differences from PyYAML's defaults: `5e-7` is a number (as in YAML 1.2), a key that appears twice is an error, and
aliases may not stand for more than MOST values, which would fill the memory."""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST = 100_000


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def parse(text: str, where: str) -> Any:
    """Returns the value of a YAML text. Raises ValueError: one sentence that begins with `where`."""
    loader = _Loader(text)
    try:
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
    except (yaml.YAMLError, ValueError) as error:  # a date that there is not, a number of too many digits
        raise ValueError(f"{where}: {str(error).splitlines()[0]}; correct the YAML") from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Returns the number of values in a node, each alias counted as what it stands for; infinity for one that holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")
        values = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]  # a mapping has pairs
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]
