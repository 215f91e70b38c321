"""What the page says of each stage: charts, data, origins, lineage, versions, configuration, and where it was published."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from evaluation.curves import Run, stage_chart
from evaluation.family import family_svg
from evaluation.phases import Phase, phases_of, waits_of
from evaluation.summary import Evidence
from rlhf_core.config import Publication
from rlhf_core.data.report import stored_warnings
from rlhf_core.lineage import TRAINS, data_of, lineage
from rlhf_core.passwords import without_passwords
from rlhf_core.stage import LOG

LOG_LINES = 25


class Chart(NamedTuple):
    """The curves of one stage or loop, and its result's metrics (`notes`), which speak of `when`; of PPO, where the time went."""

    title: str
    seconds: float | None
    svg: Markup | None
    when: str
    notes: dict[str, float]
    phases: list[Phase]
    waits: dict[str, float]


class PublishedRow(NamedTuple):
    """What a publication stage put where: on the Hub with commit and tag, or in a folder."""

    stage: str
    what: str
    where: str
    files: float
    megabytes: float


def charts(stages: Sequence[Evidence], chains: Sequence[Sequence[Evidence]]) -> list[Chart]:
    """One chart per training stage; the rounds of a loop share one."""
    later = {stage.view.name for chain in chains for stage in chain[1:]}
    found = []
    for stage in stages:
        view = stage.view
        if view.kind in ("evaluation", "alignment_tax", "publication") or view.name in later:
            continue
        chain = next((chain for chain in chains if chain[0] is stage), [stage])
        loop = len(chain) > 1
        runs = [Run(f"round {nth}" if loop else "", member.curves) for nth, member in enumerate(chain, 1)]
        title = f"{view.name} … {chain[-1].view.name}" if loop else view.name
        svg = stage_chart(title, view.kind, runs)
        results = [member.result for member in chain if member.result]
        seconds = sum(result.seconds for result in results) if results else None
        final = {name: value for name, value in results[-1].metrics.items() if not name.startswith("data/")} if results else {}
        when = "end of the last round" if loop else "end"
        found.append(Chart(title, seconds, Markup(svg) if svg else None, when, final, phases_of(final), waits_of(final)))
    return found


def data(stages: Sequence[Evidence]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Columns, and per stage its `data/...` metrics without the prefix."""
    rows = {}
    for stage in stages:
        metrics = stage.result.metrics if stage.result else {}
        row = {name.removeprefix("data/"): value for name, value in metrics.items() if name.startswith("data/")}
        if row:
            rows[stage.view.name] = row
    return list(dict.fromkeys(column for row in rows.values() for column in row)), rows


def data_warnings(stage: Evidence) -> list[str]:
    """What the data report warns of, with files of other stages named from the folder of all stages on."""
    run_dir = stage.view.run_dir
    return [sentence.replace(f"{run_dir.parent.resolve()}/", "") for sentence in stored_warnings(run_dir)]


def origins(stage: Evidence, stages: Sequence[Evidence]) -> list[str]:
    """The parents, and the models from outside the recipe that the stage starts from."""
    inputs = stage.request.inputs if stage.request else {}
    outside = [name for name in inputs if not {name, stage.stage_of(name, stages)} & {s.view.name for s in stages}]
    return [*("…/" + Path(name).name if Path(name).is_absolute() else name for name in outside), *stage.view.parents]


def families(stages: Sequence[Evidence]) -> list[tuple[str, Markup]]:
    """The lineage of every trained model that no other stage was trained from, drawn."""
    models = [stage for stage in stages if stage.result and "checkpoint" in stage.result.outputs and stage.view.kind in TRAINS]
    used = {parent for stage in models for parent in stage.view.parents}
    found = []
    for stage in (stage for stage in models if stage.view.name not in used):
        run_dir = stage.view.run_dir
        ancestor = lineage(run_dir)
        found.append((stage.view.name, Markup(family_svg(ancestor, data_of(ancestor, run_dir.parents[1])))))
    return found


def published(stages: Sequence[Evidence]) -> list[PublishedRow]:
    """Every finished publication."""
    rows = []
    for stage in stages:
        if stage.view.kind != "publication" or stage.result is None or stage.request is None:
            continue
        config, metrics = stage.request.config, stage.result.metrics
        assert isinstance(config, Publication)
        try:
            receipt = json.loads((stage.view.run_dir / stage.result.outputs["hub"]).read_text())
            where = f"{receipt['repo_id']}, branch {config.branch}, tag {receipt['tag']}, commit {receipt['commit'][:12]}"
        except (OSError, ValueError, KeyError):
            where = f"not sent to the Hub; in stages/{stage.view.run_dir.name}"
        what = config.model or config.dataset or ""
        rows.append(PublishedRow(stage.view.name, what, where, metrics.get("files", math.nan), metrics.get("bytes", math.nan) / 1e6))
    return rows


def environments(stages: Sequence[Evidence]) -> list[tuple[str, list[str]]]:
    """Each set of versions and the stages that were made with it."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        if stage.result:
            versions = ", ".join(f"{name} {version}" for name, version in stage.result.environment.items())
            found.setdefault(versions, []).append(stage.view.name)
    return list(found.items())


def config_text(stage: Evidence) -> str | None:
    """The stage's configuration as JSON; a password inside a URL is left out."""
    if stage.request is None:
        return None
    config = {"seed": stage.request.seed, **stage.request.config.model_dump(mode="json")}
    return without_passwords(json.dumps(config, indent=2, ensure_ascii=False))


def log_tail(stage: Evidence) -> str:
    """The end of a failed stage's log, without colours."""
    file = stage.view.run_dir / LOG
    if not file.is_file():
        return ""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - 20_000))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines[-LOG_LINES:])
