"""Writes the table of README.md from results/*.json: `python -m tests.benchmarks.table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.record import RESULTS, load

README = Path(__file__).parent / "README.md"
BEGIN = "<!-- table: python -m tests.benchmarks.table -->"
END = "<!-- end of table -->"


def main() -> None:
    README.write_text(with_table(README.read_text(), records()))


def records() -> list[dict[str, Any]]:
    """All stored records, in the order of their files."""
    return [load(file) for file in sorted(RESULTS.glob("*.json"))]


def with_table(page: str, found: list[dict[str, Any]]) -> str:
    """The page with what stands between its markers replaced. Raises ValueError without the markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}: add them where the table belongs")
    return f"{before}{BEGIN}\n\n{table(found)}\n{END}{after}"


def table(found: list[dict[str, Any]]) -> str:
    """One row for each record."""
    rows = ["| name | what | figures | hardware | date, commit | command |", "|---|---|---|---|---|---|"]
    for record in found:
        what = record["title"] + (f" ({record['note']})" if "note" in record else "")
        when = ", ".join(text or "not recorded" for text in (record["date"], record["commit"]))
        name = f"[{record['name']}](results/{record['name']}.json)"
        rows.append(
            f"| {name} | {what} | {figures(record)} | {record['hardware']} | {when} | `{record['command']}` |"
        )
    return "\n".join(rows) + "\n"


def figures(record: dict[str, Any]) -> str:
    """The figures in one cell, with those of the peer in parentheses."""
    peer = record.get("peer", {"name": "", "figures": {}})
    cells = []
    for name, figure in record["figures"].items():
        text = f"{name}: {number(figure['value'])} {figure['unit']}".rstrip()
        other = peer["figures"].get(name)
        cells.append(f"{text} ({number(other)})" if other is not None else text)
    return "; ".join(cells) + (f"; in parentheses: {peer['name']}" if "peer" in record else "")


def number(value: float) -> str:
    return f"{value:,}" if abs(value) >= 1000 else f"{value:g}"


if __name__ == "__main__":
    main()
