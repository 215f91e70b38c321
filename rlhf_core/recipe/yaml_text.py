"""Reads and writes the YAML of recipes, with the scalars of YAML 1.2's core schema
(https://yaml.org/spec/1.2.2/#103-core-schema) and with merge keys (`<<: *name`), which explicit keys
override.

PyYAML alone reads YAML 1.1, in which 12:30 is 750, 010 is 8, `no` is false, 2024-01-01 is a date and 5e-7 is
a string. A duplicate key is an error. A document may hold at most MOST values once aliases are expanded,
which bounds memory use.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml
from yaml.constructor import ConstructorError

MOST = 100_000
TAG = "tag:yaml.org,2002:"
MERGE = TAG + "merge"
# The core schema's scalars: tag, pattern, first characters.
SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)
BASES = {"0o": 8, "0x": 16}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}  # type: ignore[misc]

    def __init__(self, text: str):
        super().__init__(text)
        self._checked: set[int] = set()  # ids of mappings whose own keys were checked

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # a number with too many digits, a wrong tag
            text = repr(str(node.value)[:60])
            raise ConstructorError(
                None, None, f"{text} cannot be read as the date or number it looks like", node.start_mark
            ) from None

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        base = BASES.get(text[:2])
        return int(text) if base is None else int(text[2:], base)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        return str(self.construct_scalar(node))

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Checks a mapping's own keys for duplicates, then puts the mappings named by `<<` before them."""
        if id(node) not in self._checked:
            self._checked.add(id(node))
            self._refuse_repeated(node)
        super().flatten_mapping(node)

    def _refuse_repeated(self, node: yaml.MappingNode) -> None:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == MERGE else self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ConstructorError(
                    None, None, "a key is a list or a mapping, and must be text", key_node.start_mark
                )
            if key in seen:
                raise ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
            seen.add(key)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as something else."""


for _kind, _pattern, _first in SCALARS:
    _resolver = (
        TAG + _kind,
        re.compile(f"^(?:{_pattern})$"),
        [*_first, ""] if _kind == "null" else list(_first),
    )
    _Loader.add_implicit_resolver(*_resolver)
    _Dumper.add_implicit_resolver(*_resolver)
_Loader.add_constructor(TAG + "int", _Loader.construct_integer)
_Loader.add_constructor(MERGE, _Loader.construct_text)  # where `<<` is not a key


def dump(value: Any, **options: Any) -> str:
    """Returns a value as YAML that `parse` reads back, keeping the order of keys. `options` are passed to
    PyYAML."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options))


def parse(text: str, where: str) -> Any:
    """Parses YAML and returns its value. Raises ValueError with one sentence that starts with `where`."""
    try:
        loader = _Loader(text)  # refuses control characters
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MOST:
            raise ValueError(
                f"holds more than {MOST:,} values, with those that its aliases (*name) stand for"
            )
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{where}{line}: {error.problem}; correct the YAML") from None
    except RecursionError:
        raise ValueError(
            f"{where}: its brackets are nested too deeply to be read; correct the YAML"
        ) from None
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
    ) as error:  # too many values; a tag on a value of another type
        raise ValueError(f"{where}: {str(error).splitlines()[0]}; correct the YAML") from None


def _size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Returns the number of values in a node with aliases expanded; infinity for a node that contains
    itself."""
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")
        values = node.value if isinstance(node, yaml.CollectionNode) else ()
        # a mapping has pairs
        parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]
