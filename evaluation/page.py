"""The page a person shows to others: one HTML file with the verdict, the DAG, charts, example battles, lineage and configuration.

Self-contained: inline CSS, inline SVG, no script, nothing is fetched. All text goes through Jinja2's autoescape; only our own charts are
marked safe. A part that is missing (no evaluation, a failed stage, no metrics) is said in its place.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from pydantic import ValidationError

from evaluation.curves import Run, calibration_chart, rounds_chart, stage_chart, win_rate_chart
from evaluation.dag import HEIGHT, WIDTH, draw
from evaluation.reward_eval import REWARD_MODELS, RewardReports
from evaluation.summary import Evaluated, Evidence, StageView, as_json, read, read_evaluation, summary_of, trend
from rlhf_core.data.report import stored_warnings
from rlhf_core.gates import holding
from rlhf_core.stage import LOG, write_text
from rlhf_core.types import Judging, Judgment, WinRate

MAX_TEXT = 1500  # characters of a prompt or an answer
EXAMPLES = {"won": 5, "lost": 3, "tied": 3}
LOG_LINES = 25


class Example(NamedTuple):
    """One battle. `verdict` is the judge's text of the first game, where A is the baseline, `swapped` that of the second."""

    uid: str
    category: str
    prompt: str
    before: str
    after: str
    outcome: str
    verdict: str
    swapped: str


class Group(NamedTuple):
    """Battles of one outcome: how many of all, and some of them."""

    outcome: str
    played: int
    total: int
    examples: list[Example]


class Tile(NamedTuple):
    title: str
    value: str
    note: str


class Row(NamedTuple):
    """A model in the evaluation table; `rate` is None for the baseline."""

    model: str
    rate: WinRate | None
    parent: WinRate | None
    opinions: list[WinRate]
    right: float | None
    mean_tokens: float | None
    truncated: float | None


class JudgeRow(NamedTuple):
    """A judge: what it was asked, how steady it is, how often it names the deciding judge's winner (None for that judge itself)."""

    name: str
    use: Judging | None
    swap_consistency: float
    agreement: float | None


class Chart(NamedTuple):
    """The curves of one stage or loop, and its result's metrics (`notes`), which speak of `when`."""

    title: str
    seconds: float | None
    svg: Markup | None
    when: str
    notes: dict[str, float]


def write_report(out_dir: Path, recipe_name: str, stages: Sequence[StageView]) -> Path:
    """Writes `summary.json` and `report.html` (each atomically) to `out_dir` and returns the page's path."""
    evidence = [read(view) for view in stages]
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / "summary.json", as_json(summary_of(recipe_name, evidence)))
    write_text(out_dir / "report.html", render(recipe_name, evidence))
    return out_dir / "report.html"


def render(recipe_name: str, stages: Sequence[Evidence]) -> str:
    """The page as text."""
    evaluated = read_evaluation(stages)
    chains = _rounds(stages)
    agreement = [f"{judge} in {percent(share)}" for judge, share in evaluated.report.agreement.items()] if evaluated else []
    reward_models = _reward_models(evaluated)
    calibrations = {m.model: [(b.confidence, b.accuracy, b.pairs) for b in m.calibration] for m in reward_models.models}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, duration=duration, number=number, interval=interval, controlled=controlled)
    page = environment.get_template("page.html.j2").render(
        recipe=recipe_name,
        stages=stages,
        evaluated=evaluated,
        verdict=verdict(evaluated, stages),
        tiles=_tiles(stages, evaluated),
        dag=draw({stage.view.name: stage.view.parents for stage in stages}),
        size=(WIDTH, HEIGHT),
        by_name={stage.view.name: stage for stage in stages},
        total_seconds=sum(stage.result.seconds for stage in stages if stage.result),
        troubles=[(stage, _log_tail(stage)) for stage in stages if stage.view.status == "failed"],
        gates=[verdict for stage in stages for verdict in stage.view.gates],
        win_rates=_win_rates(evaluated) if evaluated else None,
        agreement="; ".join(agreement),
        rounds=_rounds_svg(chains, evaluated, stages),
        rows=_rows(evaluated) if evaluated else [],
        categories=sorted({category for rate in evaluated.decided.values() for category in rate.by_category}) if evaluated else [],
        judges=_judges(evaluated) if evaluated else [],
        reward_models=reward_models,
        calibration=Markup(calibration_chart(calibrations)) if calibrations else None,
        groups=_examples(evaluated) if evaluated else [],
        charts=_charts(stages, chains),
        data=_data(stages),
        data_warnings={stage.view.name: found for stage in stages if (found := _data_warnings(Path(stage.view.run_dir)))},
        origins={stage.view.name: _origins(stage, stages) for stage in stages},
        environments=_environments(stages),
        configs={stage.view.name: _config(stage) for stage in stages},
    )
    return page.encode("utf-8", "replace").decode()  # a model may emit half of a surrogate pair


def _data_warnings(run_dir: Path) -> list[str]:
    """What the data report warns of, with files of other stages named from the folder of all stages on."""
    return [sentence.replace(f"{run_dir.parent.resolve()}/", "") for sentence in stored_warnings(run_dir)]


def verdict(evaluated: Evaluated | None, stages: Sequence[Evidence]) -> str:
    """One sentence: is the final model better, and how sure is that."""
    if evaluated is None:
        stopped = [stage.view.name for stage in stages if stage.view.status == "failed"]
        if stopped:
            return f"The run stopped at {', '.join(stopped)}: there is no evaluation."
        held = [stage.view.name for stage in stages if holding(stage.view.gates)]
        if held:
            return f"The run stopped after {', '.join(held)}, which did not pass a gate: there is no evaluation."
        return "This run has no evaluation (yet)."
    rate = evaluated.decided[evaluated.final]
    edge = any(round(100 * bound) == 50 for bound in (rate.ci_low, rate.ci_high))
    digits = 1 if edge else 0  # an interval that ends near one half is told exactly
    won = percent(rate.win_rate, digits)
    evidence = f"(95 % interval {interval(rate, digits)}, {rate.num_questions} questions, judge: {rate.judge})"
    final, baseline = f"The final model ({rate.model})", _title(rate.baseline)
    if rate.ci_low > 0.5:
        return f"{final} beats {baseline} in {won} of battles {evidence}."
    if rate.ci_high < 0.5:
        return f"{final} is worse than {baseline}: it wins only {won} of battles {evidence}."
    return f"{final} is not clearly better or worse than {baseline}: it wins {won} of battles {evidence}."


def percent(value: float | None, digits: int = 0) -> str:
    """A share in [0, 1] as a percentage."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def controlled(rate: WinRate, digits: int = 0) -> str:
    """The length-controlled win rate with its 95 % interval."""
    if rate.length_controlled is None or rate.lc_low is None or rate.lc_high is None:
        return "–"
    return f"{percent(rate.length_controlled, digits)} ({100 * rate.lc_low:.{digits}f}–{100 * rate.lc_high:.{digits}f})"


def interval(rate: WinRate, digits: int = 0) -> str:
    """The win rate's 95 % interval."""
    return f"{100 * rate.ci_low:.{digits}f}–{100 * rate.ci_high:.{digits}f} %"


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _tiles(stages: Sequence[Evidence], evaluated: Evaluated | None) -> list[Tile]:
    tiles = []
    if evaluated:
        rate, right = evaluated.decided[evaluated.final], evaluated.report.right
        tiles.append(Tile("Battles won", percent(rate.win_rate), f"{interval(rate)} against {_title(rate.baseline)}"))
        if {rate.baseline, rate.model} <= right.keys():
            value = f"{percent(right[rate.baseline])} → {percent(right[rate.model])}"
            tiles.append(Tile("Right answers", value, f"{_title(rate.baseline)} → {rate.model}"))
    for stage in stages:
        name = "" if stage.view.name == stage.view.kind else f" ({stage.view.name})"
        rise = trend(stage.curves.get("reward/mean", []))
        if stage.view.kind == "ppo" and rise:
            note = "first → last fifth of the run"
            tiles.append(Tile(f"PPO reward{name}", f"{number(rise.first)} → {number(rise.last)}", _errors(note, rise.errors)))
        accuracy = stage.result.metrics.get("eval/accuracy") if stage.result else None
        if stage.view.kind == "reward_model" and accuracy is not None:
            tiles.append(Tile(f"Reward model{name}", percent(accuracy), "held-out pairs ranked right"))
    return tiles


def _title(model: str) -> str:
    return "SFT" if model == "sft" else model


def _errors(note: str, errors: float | None) -> str:
    return note if errors is None else f"{note}, {errors:+.1f} standard errors"


def _rounds(stages: Sequence[Evidence]) -> list[list[Evidence]]:
    """Chains of stages that train on what a preferences stage sampled, each round on the one before."""
    kinds = {stage.view.name: stage.view.kind for stage in stages}
    chains: list[list[Evidence]] = []
    for stage in stages:
        if stage.view.kind not in ("dpo", "kto", "sft") or "preferences" not in (kinds.get(parent) for parent in stage.view.parents):
            continue
        before = next((chain for chain in chains if chain[-1].view.name in stage.view.parents), None)
        if before is None:
            chains.append([stage])
        else:
            before.append(stage)
    return chains


def _rounds_svg(chains: Sequence[Sequence[Evidence]], evaluated: Evaluated | None, stages: Sequence[Evidence]) -> Markup | None:
    if evaluated is None:
        return None
    rates = {evaluated.stage.stage_of(model, stages): rate for model, rate in evaluated.decided.items()}  # by stage, not by alias
    baseline = evaluated.stage.stage_of(evaluated.report.baseline, stages)
    lines = []
    for chain in chains:
        points = []
        for stage in [*(s for s in stages if s.view.name in chain[0].view.parents and s.view.kind != "preferences"), *chain]:
            rate = rates.get(stage.view.name)
            if rate:
                points.append((rate.model, rate.win_rate, rate.ci_low, rate.ci_high))
            elif stage.view.name == baseline:
                points.append((evaluated.report.baseline, 0.5, 0.5, 0.5))
        if len(points) > 1:
            lines.append(points)
    kinds = sorted({chain[0].view.kind.upper() for chain in chains})
    return Markup(rounds_chart(lines, " and ".join(kinds))) if lines else None


def _rows(evaluated: Evaluated) -> list[Row]:
    report = evaluated.report

    def row(model: str, rate: WinRate | None) -> Row:
        opinions = [other for other in evaluated.opinions if other.model == model]
        return Row(
            model,
            rate,
            evaluated.against_parent.get(model),
            opinions,
            report.right.get(model),
            report.mean_tokens.get(model),
            report.truncated.get(model),
        )

    models = [row(model, rate) for model, rate in evaluated.decided.items()]
    return models if report.baseline in evaluated.decided else [row(report.baseline, None), *models]


def _win_rates(evaluated: Evaluated) -> Markup:
    return Markup(win_rate_chart(list(evaluated.decided.values()), evaluated.final, evaluated.against_parent))


def _judges(evaluated: Evaluated) -> list[JudgeRow]:
    """The judge that decides first."""
    return [
        JudgeRow(
            report.judge,
            report.judging,
            fmean(rate.swap_consistency for rate in report.win_rates) if report.win_rates else 0.0,
            evaluated.report.agreement.get(report.judge),
        )
        for report in (evaluated.report, *evaluated.others)
    ]


def _reward_models(evaluated: Evaluated | None) -> RewardReports:
    """Empty when none were evaluated."""
    try:
        return RewardReports.model_validate_json((evaluated.folder / REWARD_MODELS).read_text()) if evaluated else RewardReports.empty()
    except (OSError, ValidationError):
        return RewardReports.empty()


def _examples(evaluated: Evaluated) -> list[Group]:
    answers: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for row in _jsonl(evaluated.folder / "answers"):
        answers[str(row.get("model"))][str(row.get("uid"))] = _conversation(row.get("messages"))
    before, after = answers[evaluated.report.baseline], answers[evaluated.final]
    battles: dict[str, list[Judgment]] = {outcome: [] for outcome in EXAMPLES}
    for row in _jsonl(evaluated.folder / "judgments"):
        try:
            battle = Judgment.model_validate(row)
        except ValidationError:
            continue
        ours = (battle.judge, battle.model, battle.baseline) == (evaluated.report.judge, evaluated.final, evaluated.report.baseline)
        if ours and battle.score is not None and battle.uid in before and battle.uid in after:
            battles["won" if battle.score > 0.5 else "lost" if battle.score < 0.5 else "tied"].append(battle)
    total = sum(map(len, battles.values()))
    groups = []
    for outcome, played in battles.items():
        chosen = [
            Example(
                uid=battle.uid,
                category=battle.category,
                prompt=_cut(before[battle.uid][0]),
                before=_cut(before[battle.uid][1]),
                after=_cut(after[battle.uid][1]),
                outcome=outcome,
                verdict=_cut(battle.games[0].judgment.get("answer", "")),
                swapped=_cut(battle.games[1].judgment.get("answer", "")),
            )
            for battle in _by_turns(played, EXAMPLES[outcome])
        ]
        groups.append(Group(outcome, len(played), total, chosen))
    return groups if total else []


def _by_turns(battles: Sequence[Judgment], limit: int) -> list[Judgment]:
    """The first battle of every category, then the second of every category, and so on."""
    seen: dict[str, int] = defaultdict(int)
    turns = []
    for battle in battles:
        turns.append((seen[battle.category], battle.category, battle))
        seen[battle.category] += 1
    return [battle for *_, battle in sorted(turns, key=lambda turn: turn[:2])[:limit]]


def _conversation(messages: Any) -> tuple[str, str]:
    """(prompt, answer) of Arena-Hard's messages; an assistant's content may be a string or `{"answer": ...}`."""
    texts = []
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        texts.append(str(content.get("answer", "")) if isinstance(content, dict) else str(content or ""))
    return ("\n\n".join(texts[:-1]), texts[-1]) if texts else ("", "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT} more characters)"


def _jsonl(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def _charts(stages: Sequence[Evidence], chains: Sequence[Sequence[Evidence]]) -> list[Chart]:
    """One chart per training stage; the rounds of a loop share one."""
    later = {stage.view.name for chain in chains for stage in chain[1:]}
    charts = []
    for stage in stages:
        view = stage.view
        if view.kind in ("evaluation", "publication") or view.name in later:
            continue
        chain = next((chain for chain in chains if chain[0] is stage), [stage])
        loop = len(chain) > 1
        runs = [Run(f"round {nth}" if loop else "", member.curves) for nth, member in enumerate(chain, 1)]
        title = f"{view.name} … {chain[-1].view.name}" if loop else view.name
        svg = stage_chart(title, view.kind, runs)
        results = [member.result for member in chain if member.result]
        seconds = sum(result.seconds for result in results) if results else None
        final = {name: value for name, value in results[-1].metrics.items() if not name.startswith("data/")} if results else {}
        charts.append(Chart(title, seconds, Markup(svg) if svg else None, "end of the last round" if loop else "end", final))
    return charts


def _data(stages: Sequence[Evidence]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Columns, and per stage its `data/...` metrics without the prefix."""
    rows = {}
    for stage in stages:
        metrics = stage.result.metrics if stage.result else {}
        row = {name.removeprefix("data/"): value for name, value in metrics.items() if name.startswith("data/")}
        if row:
            rows[stage.view.name] = row
    return list(dict.fromkeys(column for row in rows.values() for column in row)), rows


def _origins(stage: Evidence, stages: Sequence[Evidence]) -> list[str]:
    """The parents, and the models from outside the recipe that the stage starts from."""
    inputs = stage.request.inputs if stage.request else {}
    outside = [name for name in inputs if not {name, stage.stage_of(name, stages)} & {s.view.name for s in stages}]
    return [*("…/" + Path(name).name if Path(name).is_absolute() else name for name in outside), *stage.view.parents]


def _environments(stages: Sequence[Evidence]) -> list[tuple[str, list[str]]]:
    """Each set of versions and the stages that were made with it."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        if stage.result:
            versions = ", ".join(f"{name} {version}" for name, version in stage.result.environment.items())
            found.setdefault(versions, []).append(stage.view.name)
    return list(found.items())


def _config(stage: Evidence) -> str | None:
    """The stage's configuration as JSON; a password inside a URL is left out."""
    if stage.request is None:
        return None
    config = {"seed": stage.request.seed, **stage.request.config.model_dump(mode="json")}
    return re.sub(r"://[^/@\s\"]+@", "://***@", json.dumps(config, indent=2, ensure_ascii=False))


def _log_tail(stage: Evidence) -> str:
    """The end of a failed stage's log, without colours."""
    file = stage.view.run_dir / LOG
    if not file.is_file():
        return ""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - 20_000))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines[-LOG_LINES:])
