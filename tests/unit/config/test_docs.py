"""Pages name what is there, link to what exists, are short, and generated ones are those of the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from cyclopts import Parameter
from docstring_parser import parse

from flows.cli import loop_commands as cli_loops
from flows.cli.app import COMMANDS, main
from flows.cli.config_page import config_page
from rlhf_core.config import KINDS

ROOT = Path(__file__).parents[3]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "tests").rglob("*.md"))]
OURS = "flows|tasks|evaluation|rlhf_core|deployments|requirements|tests|docs|\\.ci"
WORDS = 1200
README_WORDS = 1200
NAMES = (
    "pairs-on-the-hub",
    "math",
    "code",
    "gpt",
    "top_p",
    "trial",
    "best",
    "blend",
    "other",
    "share",
    "game",
    "sums",
    "grm",
)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def links(page: Path) -> Iterator[Path]:
    """The targets of relative links."""
    yield from (page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(page)))


def named(page: Path) -> Iterator[Path]:
    """The targets of links, and what is in backticks and begins with a folder of ours."""
    yield from links(page)
    yield from (ROOT / path for path in re.findall(rf"`((?:{OURS})/[\w./-]*)`", prose(page)))


def anchors(page: Path) -> dict[str, str]:
    """The anchor of each heading as GitHub makes it, with that of MkDocs (Python-Markdown), which folds runs
    of dashes and spaces."""
    titles = [
        re.sub(r"[`*]", "", title).strip().lower()
        for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    ]
    kept = [re.sub(r"[^\w\s-]", "", title) for title in titles]
    return {title.replace(" ", "-"): re.sub(r"[-\s]+", "-", title.strip()) for title in kept}


def test_the_list_of_config_fields_is_current() -> None:
    page = ROOT / "docs" / "reference" / "config.md"
    assert page.read_text() == config_page() + "\n", "run: alignflow config-docs > docs/reference/config.md"


def test_a_field_that_stages_share_is_listed_once() -> None:
    rows = [line for line in config_page().splitlines() if line.startswith("| `")]
    assert [row for row in set(rows) if rows.count(row) > 1] == [], (
        "put it into a class that both stages extend"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [path.as_posix() for path in named(page) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_anchors_that_a_page_links_to_exist_on_github_and_in_the_site(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", prose(page)):
        found = anchors((page.parent / link).resolve() if link else page)
        assert found.get(anchor) == anchor, f"{link}#{anchor}: the headings are {sorted(found)}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_short_and_stays_inside_the_site(page: Path) -> None:
    if page.parent.name != "reference":
        assert len(page.read_text().split()) <= WORDS
    outside = [link.as_posix() for link in links(page) if not link.resolve().is_relative_to(ROOT / "docs")]
    assert outside == [], "pages of the site link to pages of docs/ alone: name other files in backticks"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lists_and_tables_follow_an_empty_line(page: Path) -> None:
    """Otherwise MkDocs shows them as text, though GitHub does not."""
    lines = FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text()).split("\n")
    starts = [
        line
        for before, line in pairwise(lines)
        if re.match(r"- |\d+\. |\|", line) and before.strip() and not re.match(r"- |\d+\. |\||  ", before)
    ]
    assert starts == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        for item in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
            yield from pages(item)

    assert sorted(pages(site["nav"])) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)
    assert site["theme"]["highlightjs"] is False, "it is loaded from elsewhere"


def test_commands_and_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spans = [
        span
        for page in PAGES
        for pair in re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", page.read_text(), re.DOTALL)
        for span in pair
    ]
    commands, made = (
        set(re.findall(rf"^{word} ([a-z][a-z-]*)", "\n".join(spans), re.MULTILINE))
        for word in ("alignflow", "make")
    )
    assert len(commands) > 15 and commands - {*COMMANDS, "loop", "runs", "feedback", "suite"} == set()
    assert len(made) > 4 and made - targets == set()


def test_tests_that_pages_name_exist() -> None:
    written = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    names = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert len(names) > 9 and {name for name in names if f"def {name}(" not in written} == set()


def test_keys_of_recipes_on_pages_are_fields() -> None:
    """What a recipe itself names (a stage, an endpoint and the fields of its requests) is in NAMES."""
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    known = {*re.findall(r"^\| `(\w+)`", page, re.MULTILINE), *KINDS, *NAMES}

    def keys(part: Any) -> Iterator[str]:
        # whose names are its own
        inside = (
            [item for name, item in part.items() if name not in ("deepspeed", "template_args", "tasks")]
            if isinstance(part, dict)
            else part
        )
        for item in inside if isinstance(inside, list) else ():
            yield from keys(item)
        yield from part if isinstance(part, dict) else ()

    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) > 20
    assert {
        key for block in blocks for key in keys(yaml.safe_load(block.replace(", ...", "")))
    } - known == set()


def test_the_page_of_commands_has_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert [
        name
        for name in [
            *COMMANDS,
            "loop status",
            *(f"feedback {name}" for name in ("import", "status", "serve", "forget")),
        ]
        if f"| `alignflow {name}" not in page
    ] == []


def test_the_readme_names_every_package() -> None:
    packages = {
        file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "rlhf_core").glob("*/__init__.py")
    }
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert packages - listed == set()


@pytest.mark.parametrize(("name", "command"), [*COMMANDS.items(), ("loop status", cli_loops.status)])
def test_every_parameter_is_described(
    name: str, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    described = {
        parameter.arg_name: parameter.description for parameter in parse(command.__doc__ or "").params
    }
    hints = get_type_hints(command, include_extras=True)  # what several commands take describes itself
    described |= {
        field: part.help
        for field, hint in hints.items()
        for part in get_args(hint)
        if isinstance(part, Parameter) and part.help
    }
    assert described.keys() == inspect.signature(command).parameters.keys()
    assert main([*name.split(), "--help"]) == 0
    shown = "".join(character for character in capsys.readouterr().out if character.isalnum())
    for parameter, text in described.items():
        assert text and "".join(character for character in text if character.isalnum()) in shown, parameter
