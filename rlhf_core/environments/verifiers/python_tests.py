"""Splits tests written in Python into checks, and finds the names of the answer that they use.

No part of the tests is left out: anything that cannot run here, or would test nothing, makes them unreadable.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from rlhf_core.environments.verifiers.call_sides import COMMON

ENTRY = re.compile(r"(?:Solution\(\)\.)?([A-Za-z_]\w*)")
GIVEN = {"_same", "candidate", "__name__"}  # names that do not belong to the answer
RUNNERS = {"unittest", "doctest"}  # these report failures but raise nothing
INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
STANDARD: dict[str, Any] = {}
exec(COMMON, STANDARD)  # noqa: S102 imports from the standard library

Definitions = dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]


def checks_of(code: str, entry: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the checks, and the names of the answer that they use. A check ends with an assert, or with a
    statement that contains or calls one. `entry`: the name of the answer's function, to pass to a function
    `check`. Raises ValueError for tests that cannot be run."""
    body: list[ast.stmt] = []
    of_answer: set[str] = set()
    for part in ast.parse(code).body:
        if isinstance(part, ast.ImportFrom) and part.module == "solution" and not part.level:
            of_answer |= set(_imported(part))
        else:
            body.append(part)
    _refuse_imports(body)
    calls = _calls(body, entry)
    if any(call.startswith("check(") for call in calls):
        of_answer.add(str(entry).partition("(")[0])
    body += ast.parse("\n".join(calls)).body
    defined = _definitions(body)
    _refuse_unused(body, defined)
    checks = _pieces(body, _asserting(defined))
    names = _names(body, of_answer)
    if checks and not names:
        raise ValueError("tests that use nothing of the answer")
    _refuse_objects(body, set(names))
    return tuple(checks), names


def _imported(part: ast.ImportFrom) -> list[str]:
    """Returns the names that a statement imports from the answer, as though it were a module `solution`."""
    for alias in part.names:
        if alias.asname not in (None, alias.name):
            raise ValueError(f"tests that import {alias.name} under another name")
    return [alias.name for alias in part.names if alias.name != "*"]


def _refuse_imports(body: list[ast.stmt]) -> None:
    for node in ast.walk(ast.Module(body, [])):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        for module in modules:
            name = module.partition(".")[0]
            if name in RUNNERS and module != "unittest.mock":
                raise ValueError(f"tests that {name} runs: write them as functions test_... with asserts")
            if name not in sys.stdlib_module_names:
                raise ValueError(f"tests that import {module}, which is not in Python's standard library")


def _calls(body: list[ast.stmt], entry: Any) -> list[str]:
    """Returns calls to the test functions, `check` and `test...`, that nothing else calls."""
    defined = _definitions(body)
    reached = _reached(body, defined)
    calls = []
    for name, node in defined.items():
        if name in reached or not isinstance(node, ast.FunctionDef):
            continue
        if name == "check":
            if not isinstance(entry, str) or not ENTRY.fullmatch(entry):
                raise ValueError(
                    "a function check, which nothing calls: name the answer's function in entry_point"
                )
            calls.append(f"check({entry})")
        elif name.startswith("test") and not _parameters(node):
            calls.append(f"{name}()")
        else:
            continue
        if sum(getattr(part, "name", "") == name for part in body) > 1:
            raise ValueError(f"two functions {name}, of which only one would run")
    return calls


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns how many arguments a function requires."""
    given = node.args
    needed = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    return needed + sum(default is None for default in given.kw_defaults)


def _refuse_unused(body: list[ast.stmt], defined: Definitions) -> None:
    reached = _reached(body, defined)
    for name, node in defined.items():
        if name in reached:
            continue
        if isinstance(node, ast.ClassDef) and name.startswith("Test"):
            raise ValueError(f"the test class {name}: write its tests as functions test_...")
        if isinstance(node, ast.AsyncFunctionDef) and name.startswith("test"):
            raise ValueError(f"the asynchronous test {name}, which nothing calls")
        if isinstance(node, ast.FunctionDef) and name.startswith("test"):
            raise ValueError(f"the test {name} with parameters, for which there are no values")
        if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
            raise ValueError(f"asserts in {name}, which nothing calls")


def _outside(part: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a statement, except nodes inside functions and classes."""
    yield part
    if not isinstance(part, INNER):
        for child in ast.iter_child_nodes(part):
            yield from _outside(child)


def _definitions(body: list[ast.stmt]) -> Definitions:
    nodes = [node for part in body for node in _outside(part)]
    return {node.name: node for node in nodes if isinstance(node, INNER)}


def _reached(body: list[ast.stmt], defined: Definitions) -> set[str]:
    """Returns the functions and classes that the statements use, directly or through each other."""
    outside = [node for part in body for node in _outside(part)]
    waiting = _loads(outside)
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in defined and name not in reached:
            reached.add(name)
            waiting += _loads(ast.walk(defined[name]))
    return reached


def _loads(nodes: Iterable[ast.AST]) -> list[str]:
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def _asserting(defined: Definitions) -> set[str]:
    """Returns the functions and classes that contain an assert or use a function or class that does."""
    found: set[str] = set()
    more = {name for name, node in defined.items() if any(map(_is_assert, ast.walk(node)))}
    while more - found:
        found |= more
        more = {name for name, node in defined.items() if found & set(_loads(ast.walk(node)))}
    return found


def _is_assert(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise) and node.exc is not None:
        return "AssertionError" in _loads(ast.walk(node.exc))
    return isinstance(node, ast.Assert)


def _pieces(body: list[ast.stmt], asserting: set[str]) -> list[str]:
    """Returns the code in pieces, each ending with a statement that tests something. Statements after the
    last of these are added to its piece."""
    pieces: list[list[ast.stmt]] = []
    piece: list[ast.stmt] = []
    for part in body:
        piece.append(part)
        nodes = list(_outside(part))
        tests = any(isinstance(node, ast.Assert | ast.Raise) for node in nodes)
        if tests or asserting & set(_loads(nodes)):
            pieces.append(piece)
            piece = []
    if pieces:
        pieces[-1] += piece
    return [ast.unparse(ast.Module(piece, [])) for piece in pieces]


def _names(body: list[ast.stmt], of_answer: set[str]) -> tuple[str, ...]:
    """Returns the names that the answer must define. These are the names that the code uses but does not
    bind, if they are in `of_answer` or do not come from Python. The answer itself does not affect the result,
    since it must not replace the objects with which its results are compared. Raises ValueError for a name
    that could belong to the answer or to Python."""
    nodes = list(ast.walk(ast.Module(body, [])))
    bound = {name for node in nodes for name in _bound(node)}
    used = dict.fromkeys(name for name in _loads(nodes) if name not in bound | GIVEN)
    names = [name for name in used if name in of_answer or not _is_standard(name)]
    called = {
        node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    either = [name for name in used if name in called and name in STANDARD and name not in names]
    modules = [name for name in either if isinstance(STANDARD[name], ModuleType)]  # are not callable
    unclear = [name for name in either if name not in modules]
    names += modules
    if unclear and (names or len(unclear) > 1):
        raise ValueError(f"tests that use {unclear[0]}, of Python or of the answer: import it in the tests")
    return (*names, *unclear)


def _is_standard(name: str) -> bool:
    return name in STANDARD or hasattr(builtins, name)


def _bound(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.arg(arg=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.ExceptHandler(name=str(name)):
            return [name]
    return []


def _refuse_objects(body: list[ast.stmt], names: set[str]) -> None:
    """Raises ValueError for tests that need the answer's classes or the identity of its results, since
    results arrive as plain data from another process."""
    for node in ast.walk(ast.Module(body, [])):
        classes: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            classes = [node.type]
        if isinstance(node, ast.ClassDef):
            classes = node.bases
        if isinstance(node, ast.Call) and _loads([node.func]) in (["isinstance"], ["issubclass"]):
            classes = node.args[1:]
        for name in [name for part in classes for name in _loads(ast.walk(part))]:
            if name in names:
                raise ValueError(f"tests that use the answer's {name} as a class of objects or errors")
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            sides = [node.left, *node.comparators]
            if not any(isinstance(side, ast.Constant) or _is_type(side) for side in sides):
                raise ValueError("tests that compare objects by `is`")


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and isinstance(getattr(builtins, node.id, None), type)
