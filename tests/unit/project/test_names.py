"""Resolves the names in backticks of docs and docstrings: a name that no code has is stale."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPAN = re.compile(r"`([^`]+)`")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names that only a program has: snake_case, CamelCase, or with a leading underscore. Words are left out, and
# so are constants, which stand for values to fill in.
NAME = re.compile(r"[a-z][a-z0-9]+(_[a-z0-9]+)+|[a-z]+[A-Z]\w*|([A-Z][a-z0-9]+){2,}|_[a-z]\w+")
# A variable of a formula, such as `r_c`, `delta_t`, `V_old`.
VARIABLE = re.compile(r"\w_\w+|\w+_\w")
# Names in other projects' code, which this one describes and does not use.
ELSEWHERE = {
    "add_markdown_info",  # arena-hard-auto
    "load_module",  # Prefect
    "load_weights",  # vLLM
    "show_result",  # arena-hard-auto
    "upload_folder",  # huggingface_hub
}
IN_EXAMPLES = {"dpo_a", "dpo_b", "micro_batch"}
# Names of metrics are put together where they are computed.
COMPOSED = re.compile(r"\w+_(low|high|p|tokens|vs_parent)|reward_\w+")


@cache
def tracked() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for name in listed.stdout.split("\n") if (path := ROOT / name).is_file())


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


@cache
def names_in_code() -> frozenset[str]:
    """Returns all words of the code without docstrings and comments, of its files' names, and of recipes,
    templates and settings."""
    found = set[str]()
    for path in tracked():
        found.update(WORD.findall(path.relative_to(ROOT).as_posix()))
        if path.suffix == ".py":
            found.update(words_of(ast.parse(path.read_text())))
        elif path.suffix not in (".md", ".json", ".jsonl", ".png", ".svg"):
            found.update(WORD.findall(path.read_text(errors="ignore")))
    return frozenset(found)


def words_of(tree: ast.AST) -> Iterator[str]:
    described = set(map(id, docstrings(tree)))
    for node in ast.walk(tree):
        for value in vars(node).values():
            if isinstance(value, str) and id(node) not in described:
                yield from WORD.findall(value)


def stale(text: str) -> Iterator[str]:
    """Yields the names in backticks of a text that nothing in the code has."""
    for span in SPAN.findall(text):
        for word in WORD.findall(span.replace("\\n", " ")):
            if not NAME.fullmatch(word) or VARIABLE.fullmatch(word) or word in names_in_code():
                continue
            if word in ELSEWHERE | IN_EXAMPLES or COMPOSED.fullmatch(word):
                continue
            yield f"`{span}`: {word}"


def pages() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md" and path.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_in_a_page_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert list(stale(text)) == []


def test_names_in_docstrings_exist() -> None:
    found = []
    for path in tracked():
        if path.suffix != ".py" or path.is_relative_to(ROOT / "tests"):
            continue
        for docstring in docstrings(ast.parse(path.read_text())):
            text = re.sub(r"\n\s*", " ", str(docstring.value))
            found += [f"{path.relative_to(ROOT)}:{docstring.lineno}: {told}" for told in stale(text)]
    assert found == []


def test_a_stale_name_is_found() -> None:
    names = ["attention_of" + "_old", "NoSuch" + "Thing"]  # in two parts: this file is code too
    text = f"see `{names[0]}` and `{names[1]}`, not `write_text`"
    assert list(stale(text)) == [f"`{name}`: {name}" for name in names]


def test_a_class_name_has_one_owner() -> None:
    """One that is searched for is found once."""
    owners: dict[str, list[str]] = {}
    for path in tracked():
        folder, *_ = path.relative_to(ROOT).parts
        if path.suffix == ".py" and folder in ("flows", "tasks", "evaluation", "rlhf_core"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    owners.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert len(owners) > 300
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}


def test_a_file_name_has_one_owner() -> None:
    """`gates.py` in three folders would have to be told apart by its path in every list, tab and search."""
    owners: dict[str, list[str]] = {}
    for path in tracked():
        folder, *_ = path.relative_to(ROOT).parts
        if path.suffix == ".py" and folder in ("flows", "tasks", "evaluation", "rlhf_core"):
            owners.setdefault(path.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name for name, places in owners.items() if len(places) > 1}
    assert len(owners) > 300 and twice == {"__init__.py", "__main__.py"}


IMPORT = re.compile(r"^from ((?:rlhf_core|evaluation|tasks|flows)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def defined_in(module: str) -> set[str] | None:
    """Returns the names at the top of a module of this project; None for a package."""
    file = ROOT / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text())
    found = {node.name for node in tree.body if hasattr(node, "name")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_programs_in_strings_import_what_there_is() -> None:
    """Type checkers do not read the programs that tests give to other processes."""
    missing = []
    seen = 0
    for path in tracked():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            for module, names in IMPORT.findall(node.value):
                there = defined_in(module)
                seen += 1
                if there is not None:
                    missing += [
                        f"{path.name}: {module}.{name}"
                        for name in (part.split(" as ")[0].strip() for part in names.split(","))
                        if name not in there
                    ]
    assert seen > 20
    assert missing == []
