"""Writes the data report of a stage before it trains: `data_report.json`, `.md` for readers, and `.svg` with
the lengths. Torch-free."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.data.survey import BALANCE, LIMITS, DataReport, Survey, shared_prompts
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.files import write_text
from rlhf_core.system.markdown_table import table

JSON = "data_report.json"
MARKDOWN = "data_report.md"
CHART = "data_report.svg"
NUMBERS = ("margin ", "reward ")  # prefixes of facts that are not fractions


def write_data_report(run: RunDir, name: str, **parts: DataReport | None) -> None:
    """Writes the three files for a stage's data sets, which are passed by config field, and prints their
    warnings."""
    surveys = surveys_of(parts)
    run.path.mkdir(parents=True, exist_ok=True)
    write_text(run / CHART, chart(surveys))
    write_text(run / MARKDOWN, f"# Data of {name}\n\n{markdown(surveys)}\n![lengths]({CHART})\n")
    write_text(
        run / JSON,
        json.dumps({field: survey.model_dump(mode="json") for field, survey in surveys.items()}, indent=2)
        + "\n",
    )
    for sentence in warnings(surveys):
        print(f"warning: {sentence}", flush=True)


def surveys_of(parts: Mapping[str, DataReport | None]) -> dict[str, Survey]:
    """Returns the surveys by field. The survey of `eval_data` or `eval_prompts` also contains the fraction of
    prompts that are in the training data."""
    reports = {field: report for field, report in parts.items() if report is not None}
    surveys = {field: report.survey for field, report in reports.items()}
    for trained, held_out in (("data", "eval_data"), ("prompts", "eval_prompts")):
        if trained in reports and held_out in reports:
            share, finding = shared_prompts(reports[trained], reports[held_out])
            own = surveys[held_out]
            findings = (*own.findings, finding) if finding else own.findings
            surveys[held_out] = own.model_copy(
                update={"facts": own.facts | {"shared with data": share}, "findings": findings}
            )
    return surveys


def warnings(surveys: Mapping[str, Survey]) -> list[str]:
    """Returns one sentence per finding, with the field, the problem and an example row."""
    return [
        f"{field}: {finding.sentence}{f' (for instance {finding.example})' if finding.example else ''}"
        for field, survey in surveys.items()
        for finding in survey.findings
    ]


def stored_warnings(run_dir: Path) -> list[str]:
    """Returns the warnings in a run directory's report, or an empty list if there is no readable report."""
    try:
        content = json.loads((run_dir / JSON).read_text())
        return warnings({field: Survey.model_validate(survey) for field, survey in content.items()})
    except (OSError, ValueError):
        return []


def markdown(surveys: Mapping[str, Survey]) -> str:
    """Returns all surveys as Markdown with tables."""
    pages = []
    for field, survey in surveys.items():
        warned = [f"- **warning**: {sentence}" for sentence in warnings({field: survey})] or ["- no warnings"]
        counts = [f"{survey.rows:,} rows", f"{survey.kept:,} of {survey.items:,} {_items(survey.kind)} kept"]
        counts += [f"{count:,} left out: {why}" for why, count in survey.dropped.items()]
        counts += [f"{survey.images:,} images"] if survey.images else []
        lines = [f"## {field}", "", f"{'; '.join(counts)}. At most {survey.limit} tokens.", "", *warned, ""]
        lengths = [(part, *(f"{value:,}" for value in at.values())) for part, at in survey.lengths.items()]
        sources = [
            (use.path, f"{use.asked:.3g}", f"{use.rows:,}", f"{use.rows / survey.rows:.3f}")
            for use in survey.sources
        ]
        lines += [table(("tokens of the", "p5", "p50", "p95", "max"), lengths)]
        lines += [table(("source", "share in the recipe", "rows used", "share of the rows"), sources)]
        lines += [
            table(
                ("fact", "value", "warns"),
                ((name, _value(name, value), _limit(name)) for name, value in survey.facts.items()),
            )
        ]
        pages.append("\n".join(lines))
    return "\n".join(pages)


def chart(surveys: Mapping[str, Survey]) -> str:
    """Returns histograms of the lengths before truncation, as SVG. The dashed line is the limit."""
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(7, 1 + 1.8 * len(surveys)), layout="constrained")
    for row, (field, survey) in enumerate(surveys.items()):
        ax = figure.add_subplot(len(surveys), 1, row + 1)
        for part, (*counts, edge) in survey.histogram.items():
            width = edge / len(counts)
            ax.bar([(at + 0.5) * width for at in range(len(counts))], counts, width, alpha=0.55, label=part)
        ax.axvline(survey.limit, color="grey", linestyle="--", linewidth=0.8)
        ax.set_title(f"{field}: tokens", fontsize=9)
        ax.legend(fontsize=7)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _items(kind: str) -> str:
    return {"preference": "pairs", "prompt": "prompts", "labelled": "answers"}.get(kind, "documents")


def _value(name: str, value: float) -> str:
    return f"{value:.4g}" if name.startswith(NUMBERS) else f"{100 * value:.2f} %"


def _limit(name: str) -> str:
    if name in BALANCE:
        return "outside {:.0f} to {:.0f} %".format(*(100 * share for share in BALANCE[name]))
    if name not in LIMITS:
        return ""
    return f"above {100 * LIMITS[name]:g} %" if LIMITS[name] else "any"
