"""Generated documents are those of the code."""

from __future__ import annotations

from pathlib import Path

from flows.show import config_docs

DOCS = Path(__file__).parents[2] / "docs"


def test_the_list_of_config_fields_is_current() -> None:
    assert (DOCS / "config.md").read_text() == config_docs() + "\n", "run: alignflow config-docs > docs/config.md"
