"""Builds the dashboard's pages from parts. Each part is rendered from its own template, so that an open page
only has to replace the parts that changed.

All strings from runs (names, answers, logs, configurations) are escaped by Jinja, and their control
characters are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import traceback
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from evaluation.dashboard import compare, cost, dashboard_charts, graph, state
from evaluation.dashboard.artifacts_folder import Folder, Missing, identity_of, inside, key_of, recipe_of
from evaluation.dashboard.recorded_answers import chosen_iterations, folder_of, recorded_page
from evaluation.report.iterations import WAIT, phases_of, rollouts
from evaluation.report.rollouts.answer_view import legend_html
from evaluation.report.template import environment
from rlhf_core.recipe.loops.loop_record import FILE as LOOP
from rlhf_core.runs.run_dir import LOG, VALIDATION
from rlhf_core.runs.run_records import RUN, RunRecord
from rlhf_core.system.redaction import plain, without_passwords

LOG_LINES = 200
MAX_RUNS = 300
MAX_CHOICES = 50
MAX_CONFIG = 200_000
MAX_PANELS = 3
MAX_FILTER = 200  # length limit of the filter text, in characters
COLOURS = {
    "done": "#2e8b6f",
    "running": "#2563a8",
    "waiting": "#b7791f",
    "waits": "#b7791f",
    "failed": "#c0392b",
    "gate failed": "#c0392b",
    "killed": "#c0392b",
    "damaged": "#c0392b",
}


class Page(NamedTuple):
    """A page. `parts`: functions that return the HTML of each part; `slow`: parts that an open page rebuilds
    less often; `watched`: returns a value that stays the same while nothing changes on disk."""

    title: str
    parts: dict[str, Callable[[], str]]
    slow: frozenset[str]
    watched: Callable[[], object]

    def make(self, name: str) -> str:
        """Returns the HTML of a part, or a sentence if the files on disk cannot be shown (because they are
        damaged or from another version)."""
        try:
            return self.parts[name]()
        except Exception as error:
            title = plain(self.title).replace("\n", " ")
            told = plain(traceback.format_exc())  # because a log is read in a terminal
            logging.getLogger(__name__).error(
                "the part %s of the page %s could not be built\n%s", name, title, told
            )
            return fill("page.broken", name=name, why=type(error).__name__)


def page_of(folder: Folder, path: str, query: dict[str, str]) -> Page:
    """Returns the page at an address. Raises Missing when there is none."""
    folder.look()
    match path.strip("/").split("/"):
        case [""]:
            return overview(folder, query.get("filter", ""))
        case ["run", recipe, identity]:
            return run_page(folder, recipe, identity)
        case ["stage", name]:
            return stage_page(folder, name)
        case ["rollouts", name]:
            return rollouts_page(folder, name, query)
        case ["compare"]:
            return compare_page(folder, query.get("a", ""), query.get("b", ""))
    raise Missing(path)


def overview(folder: Folder, wanted: str = "") -> Page:
    """Returns the page of all runs, loops and stages. `wanted`: words that the text about every listed run
    must contain."""
    wanted = plain(wanted[:MAX_FILTER])

    def now() -> str:
        rows = []
        for run in (run for run in folder.runs() if run.state == "running"):
            stages = [
                stage for stage in state.run_stages(folder, run) if stage.state not in ("done", "not begun")
            ]
            shown = [
                stage
                for stage in stages
                if not (stage.state == "waiting" and stage.told.startswith(state.PARENTS))
            ]
            rows.append((run, link(run), shown, len(stages) - len(shown)))
        return fill("overview.now", runs=rows)

    def runs() -> str:
        found = folder.runs()
        words = wanted.lower().split()
        texts = {run.file: _text(run, state.champion(folder, run)) for run in found}
        chosen = [run for run in found if all(word in texts[run.file] for word in words)]
        rows = [(run, texts[run.file], _row(folder, run)) for run in chosen[:MAX_RUNS]]
        return fill("overview.runs", rows=rows, more=len(chosen) - len(rows), filtered=bool(words))

    def others() -> str:
        known = {stage.run_dir.partition("/")[2] for run in folder.runs() for stage in run.stages}
        strays = [state.stage_of(folder, folder.stage(name)) for name in folder.requests(known)]
        loops = [(file.parent.name, folder.json(file)) for file in inside(folder.path, f"*/{LOOP}")]
        return fill(
            "overview.others", stages=strays, loops=[(name, loop) for name, loop in loops if _is_loop(loop)]
        )

    def watched() -> object:
        found = folder.runs()
        dirs = {
            folder.path / stage.run_dir for run in found if run.state == "running" for stage in run.stages
        }
        crowned = [identity_of(file) for file in inside(folder.path, f"*/{state.CHAMPION}")]
        own = [(run.file, run.state, identity_of(run.file)) for run in found]
        return own, crowned, [state.watched(folder, path) for path in sorted(dirs)]

    def questions() -> str:
        return fill("overview.questions", questions=state.questions(folder))

    parts = {
        "questions": questions,
        "now": now,
        "filter": lambda: fill("overview.filter", wanted=wanted, longest=MAX_FILTER),
        "runs": runs,
        "others": others,
    }
    return Page("Runs", parts, frozenset({"questions", "others"}), watched)


def run_page(folder: Folder, recipe: str, identity: str) -> Page:
    """Returns the page of one run."""
    run = folder.run(recipe, identity)

    def stages() -> list[state.Stage]:
        return state.run_stages(folder, folder.run(recipe, identity))

    def about() -> str:
        now = folder.run(recipe, identity)
        report = f"/report/{quote(recipe)}" if folder.report(recipe) else ""
        if folder.report(recipe, identity):
            report = f"/report/{quote(recipe)}/{quote(identity)}"
        return fill("run.about", run=now, stages=stages(), report=report)

    def rivals() -> str:
        others = [other for other in folder.runs() if (recipe_of(other), key_of(other)) != (recipe, identity)]
        others.sort(key=lambda other: recipe_of(other) != recipe)
        choices = [
            (f"{recipe_of(one)}/{key_of(one)}", f"{one.recipe} {one.label}") for one in others[:MAX_CHOICES]
        ]
        return fill("run.choose", this=f"{recipe}/{identity}", choices=choices)

    def curves() -> str:
        running = [stage for stage in stages() if stage.state == "running"]
        drawn = [
            (one, dashboard_charts.main_panels(one.kind, [compare.drawable(folder, one.folder)])[:MAX_PANELS])
            for one in running
        ]
        return fill("run.curves", drawn=[(stage, panels) for stage, panels in drawn if panels])

    parts = {
        "about": about,
        "graph": lambda: fill("run.graph", graph=graph.of_run(stages())),
        "stages": lambda: fill("run.stages", stages=stages()),
        "curves": curves,
        "cost": lambda: fill("run.cost", bill=cost.bill(folder, folder.run(recipe, identity), stages())),
        "choose": rivals,
    }

    def watched() -> object:
        now = folder.run(recipe, identity)
        return (
            now.state,
            identity_of(now.file),
            [state.watched(folder, folder.path / stage.run_dir) for stage in now.stages],
        )

    return Page(f"{run.recipe} {run.label}", parts, frozenset({"choose"}), watched)


def stage_page(folder: Folder, name: str) -> Page:
    """Returns the page of one run directory."""
    run_dir = folder.stage(name)

    def kind() -> str:
        return str(folder.request(run_dir).get("config", {}).get("stage", ""))

    def curves() -> str:
        runs = [compare.drawable(folder, name)]
        last = folder.curves(run_dir).last
        return fill(
            "stage.curves",
            panels=dashboard_charts.main_panels(kind(), runs),
            others=dashboard_charts.other_panels(kind(), runs),
            last=last,
        )

    def phases() -> str:
        last = folder.curves(run_dir).last
        waits = {role.removeprefix(WAIT): share for role, share in last.items() if role.startswith(WAIT)}
        memory = {
            role.removeprefix("memory/"): gib for role, gib in last.items() if role.startswith("memory/")
        }
        return fill("stage.phases", phases=phases_of(last), waits=waits, memory=memory)

    def config() -> str:
        request = folder.request(run_dir)
        own = {"seed": request.get("seed"), **request.get("config", {})}
        return fill(
            "stage.config", text=without_passwords(json.dumps(own, indent=2, ensure_ascii=False))[:MAX_CONFIG]
        )

    def choose() -> str:
        others = [
            one
            for one, request in folder.requests().items()
            if one != name and request["config"]["stage"] == kind()
        ]
        return fill("run.choose", this=name, choices=[(other, other) for other in others[:MAX_CHOICES]])

    parts = {
        "state": lambda: fill(
            "stage.state",
            stage=state.stage_of(folder, run_dir),
            attempts=folder.attempts(run_dir).attempts[-20:],
        ),
        "curves": curves,
        "phases": phases,
        "answers": lambda: fill("stage.answers", found=rollouts(run_dir)[::-1], name=name),
        "log": lambda: fill("stage.log", text=folder.tail(run_dir / LOG, LOG_LINES)),
        "lineage": lambda: fill("stage.lineage", name=name, found=graph.of_stage(folder, name)),
        "choose": choose,
        "config": config,
    }
    return Page(
        name, parts, frozenset({"lineage", "choose", "config"}), lambda: state.watched(folder, run_dir)
    )


def rollouts_page(folder: Folder, name: str, query: dict[str, str]) -> Page:
    """Returns the page of a stage's recorded answers, token by token (`recorded_page`). Raises Missing for an
    iteration that is not recorded."""
    run_dir = folder.stage(name)
    chosen_iterations(run_dir, query)
    found = folder_of(query)

    def answers() -> str:
        page = recorded_page(folder, run_dir, query)
        here = f"/rollouts/{quote(name)}?" + ("of=validation&" if found == VALIDATION else "")
        return fill("recorded.answers", page=page, here=here, one="prompt" in query)

    parts = {
        "legend": lambda: fill(
            "recorded.legend",
            legend=legend_html(),
            name=name,
            here=f"/rollouts/{quote(name)}?",
            validated=(run_dir / VALIDATION).is_dir(),
        ),
        "answers": answers,
    }
    return Page(f"Answers of {name}", parts, frozenset(), lambda: identity_of(run_dir / found))


def compare_page(folder: Folder, a: str, b: str) -> Page:
    """Returns the page that compares two stages or two runs. Raises Missing when `a` or `b` does not exist,
    or when one of them is a stage and the other is a run."""
    one = compare.side(folder, a)
    other = compare.side(folder, b)
    if (one.run is None) != (other.run is None):
        raise Missing(f"{a} and {b}")
    parts = {
        "overlay": lambda: fill(
            "compare.overlay", one=one, other=other, overlays=compare.overlays(folder, one, other)
        ),
        "differences": lambda: fill("compare.differences", found=compare.differences(folder, one, other)),
    }
    dirs = sorted({folder.path / "stages" / name for side in (one, other) for name in side.stages.values()})
    return Page(
        "Two side by side",
        parts,
        frozenset({"differences"}),
        lambda: [state.watched(folder, path) for path in dirs],
    )


def fill(part: str, **values: Any) -> str:
    """Returns the HTML of the part named TEMPLATE.BLOCK."""
    name, _, block = part.partition(".")
    template = templates().get_template(f"{name}.html.j2")
    html = "".join(template.blocks[block](template.new_context(values)))
    return html.encode("utf-8", "replace").decode()  # replaces unpaired surrogates in answers


@cache
def templates() -> jinja2.Environment:
    """Returns the Jinja environment for this folder's templates, which is the report's with more filters."""
    made = environment(Path(__file__).parent / "templates")
    made.filters.update(plain=plain, moment=moment, quoted=quoted)
    made.globals.update(colours=COLOURS, address=graph.address)
    return made


def whole(page: Page) -> str:
    """Returns a page as HTML."""
    parts = {name: Markup(page.make(name)) for name in page.parts}
    return fill(
        "page.whole",
        title=page.title,
        parts=parts,
        digests={name: digest(html) for name, html in parts.items()},
    )


def digest(html: str) -> str:
    return hashlib.sha256(html.encode()).hexdigest()[:12]


def quoted(text: object) -> str:
    """Returns a string quoted as a single word, for use in a shell command."""
    return shlex.quote(str(text))


def moment(seconds: float | None) -> str:
    """Formats seconds since 1970 as local date and time, or – when missing."""
    return "–" if not seconds else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def link(run: RunRecord) -> str:
    """Returns the address of a run's page; '' for a damaged record."""
    return (
        ""
        if run.state == "damaged" and run.file.name != RUN
        else f"/run/{quote(recipe_of(run))}/{quote(key_of(run))}"
    )


class Row(NamedTuple):
    """A row in the list of runs: a run's record and further values. `to`: address of the run's page; `done`:
    number of its `stages` that are done; `rate`, `champion`: as in state.py."""

    to: str
    done: int
    stages: int
    rate: str
    champion: str


def _row(folder: Folder, run: RunRecord) -> Row:
    return Row(link(run), *_counts(folder, run), state.win_rate(folder, run), state.champion(folder, run))


def _counts(folder: Folder, run: RunRecord) -> tuple[int, int]:
    """Returns how many stages of a run are done and how many it has."""
    if run.ended is not None:
        return sum(stage.status in ("done", "skipped") for stage in run.stages), len(run.stages)
    return sum(stage.state == "done" for stage in state.run_stages(folder, run)), len(run.stages)


def _text(run: RunRecord, champion: str) -> str:
    """Returns the text about a run that the filter searches."""
    texts = [recipe_of(run), run.file.stem, run.recipe, run.label, run.state, run.why]
    if run.pinned:
        texts.append("pinned")
    if champion:
        texts.append(f"champion {champion}")
    return plain(" ".join(texts)).lower()


def _is_loop(loop: dict[str, Any]) -> bool:
    rounds = loop.get("rounds")
    return (
        isinstance(loop.get("loop"), str)
        and isinstance(rounds, list)
        and all(isinstance(one, dict) for one in rounds)
    )
