"""Generated documents are those of the code, and what documents name is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import COMMANDS
from flows.show import config_docs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tests").rglob("*.md"))]
OURS = "flows|tasks|evaluation|rlhf_core|deployments|requirements|tests|docs|\\.ci"


def named(page: Path) -> Iterator[Path]:
    """The targets of links, and what is in backticks and begins with a folder of ours."""
    text = page.read_text()
    yield from (page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (ROOT / path for path in re.findall(rf"`((?:{OURS})/[\w./-]*)`", prose))


def test_the_list_of_config_fields_is_current() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == config_docs() + "\n", "run: alignflow config-docs > docs/config.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [path.relative_to(ROOT).as_posix() for path in named(page) if not path.exists()] == []


def test_commands_and_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spans = [span for page in PAGES for pair in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", page.read_text(), re.DOTALL) for span in pair]
    commands, made = (set(re.findall(rf"^{word} ([a-z][a-z-]*)", "\n".join(spans), re.MULTILINE)) for word in ("alignflow", "make"))
    assert len(commands) > 15 and commands - {*COMMANDS, "loop"} == set()
    assert len(made) > 4 and made - targets == set()


def test_the_readme_names_every_package() -> None:
    packages = {file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "rlhf_core").glob("*/__init__.py")}
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert packages - listed == set()
