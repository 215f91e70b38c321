"""The HTML templates of this folder, filled in: everything is escaped, and a name without a value is an error."""

from __future__ import annotations

from pathlib import Path

import jinja2

from evaluation.words import controlled, duration, interval, number, percent


def fill(template: str, **values: object) -> str:
    """The text of a template with its values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, duration=duration, number=number, interval=interval, controlled=controlled)
    page = environment.get_template(template).render(**values)
    return page.encode("utf-8", "replace").decode()  # a model may emit half of a surrogate pair
