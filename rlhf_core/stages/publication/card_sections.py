"""Writes the sections that model cards and data cards share: gates, data and configuration. Names in these
sections contain no path on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf_core.config.gates import Verdict
from rlhf_core.hub.ids import shown
from rlhf_core.runs.lineage import Ancestor, sources, stages
from rlhf_core.system.markdown_table import table

GATE_COLUMNS = ("stage", "metric", "value", "required", "verdict")
PLAIN_KEYS = ("template",)  # a text that may contain slashes but is not a path
HIDDEN_KEYS = ("base_url", "url", "folder")  # specific to this machine and its network, so useless elsewhere


def public_names(names: Iterable[str]) -> dict[str, str]:
    """Maps an evaluation's names of models and judges to public names. A path on this machine becomes its
    last component, with a number if that name is taken."""
    found = dict.fromkeys(names)
    taken = {name for name in found if not _is_place(name)}
    public = {name: name for name in taken}
    for place in (name for name in found if _is_place(name)):
        short = shown(place)
        public[place] = next(
            free for free in (short, *(f"{short}-{n}" for n in range(2, len(found) + 2))) if free not in taken
        )
        taken.add(public[place])
    return public


def gate_section(gates: Sequence[Verdict]) -> list[str]:
    """Returns the section on the gates of the stages that led to the publication, or an empty list if there
    are none. Only gates that merely warn can have failed."""
    rows = [
        (
            verdict.stage,
            verdict.gate.what,
            verdict.value,
            verdict.gate.bound,
            "passed" if verdict.passed else f"**failed**: {verdict.meaning}".rstrip(": "),
        )
        for verdict in gates
    ]
    return (
        [
            "## Gates\n",
            "Checks that ran on the stages before this was published.\n",
            table(GATE_COLUMNS, rows),
        ]
        if rows
        else []
    )


def data_sets(model: Ancestor) -> str:
    """Returns a table of the data used by every stage of a lineage."""
    rows = [
        (
            stage.name,
            field,
            shown(source["path"]),
            source.get("split", ""),
            f"{100 * source.get('probability', 1.0):g}",
        )
        for stage, field, source in sources(model)
    ]
    if not rows:
        return "No data set is recorded for this model.\n"
    return table(("stage", "use", "data set", "split", "share %"), rows)


def configuration(model: Ancestor) -> str:
    """Returns the configuration, seed, versions and metrics of every stage, in a collapsible section."""
    parts = []
    for stage in stages(model):
        record = {"seed": stage.seed, **_public(stage.config)}
        if stage.environment:
            record["environment"] = stage.environment
        if stage.metrics:
            record["metrics"] = {_metric(key): float(f"{value:.6g}") for key, value in stage.metrics.items()}
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        parts.append(
            f"<details><summary>{stage.name} ({stage.digest})</summary>\n\n```yaml\n{text}```\n\n</details>\n"
        )
    return "\n".join(parts) or "None is recorded.\n"


def _public(value: Any, key: str = "") -> Any:
    """Returns a config without paths on this machine; a file is named by its last component."""
    if isinstance(value, dict):
        return {name: _public(item, name) for name, item in value.items() if name not in HIDDEN_KEYS}
    if isinstance(value, (list, tuple)):
        return [_public(item, key) for item in value]
    return shown(value) if isinstance(value, str) and key not in PLAIN_KEYS and _is_place(value) else value


def _is_place(name: str) -> bool:
    return "/" in name or "\\" in name


def _metric(key: str) -> str:
    """Returns a metric's key for publication. If `win_rate/MODEL` names the model by its folder, keeps only
    the folder's last component."""
    what, slash, name = key.partition("/")
    return f"{what}/{shown(name)}" if slash and Path(name).is_absolute() else key
