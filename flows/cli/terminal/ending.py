"""Prints the end of a run: the verdict, a table of its stages, and the page's path.

Gates that stopped a stage are not listed, because the error that ends the command names each one and its
meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evaluation.report.summary import Status, read, read_evaluation
from evaluation.report.verdict import verdict
from flows.cli.show import COLOURS, say, table_of
from rlhf_core.config import KINDS, Evaluation
from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.gate_checks import gates_of
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.run_dir import RunDir
from tasks.run_report import views_of

SHOWN = 4  # metrics shown for a stage other than an evaluation


def show_end(console: Console, plan: Plan, statuses: Mapping[str, str]) -> None:
    """Prints how a run ended. `statuses`: the outcome of each stage, as in `run.json`; stages without one
    were not run."""
    known: dict[str, Status] = {node.name: statuses.get(node.name, "not run") for node in plan.nodes}  # type: ignore[misc]
    evidence = [read(view) for view in views_of(plan, known)]
    evaluated = read_evaluation(evidence)
    if evaluated is not None:
        told = f"\n{verdict(evaluated, evidence)}\n"
        wrapped = console.is_terminal  # breaks lines between words
        console.print(told, style="bold", markup=False, highlight=False, soft_wrap=not wrapped)
    table = stages_table(plan.nodes, known)
    if console.is_terminal:  # one row per stage, however narrow the terminal is
        table.expand = True
        metrics = table.columns[-1]
        metrics.ratio = 1  # gets the width that the other columns leave
        metrics.no_wrap = True
        metrics.overflow = "ellipsis"
    console.print(table)
    warnings = [
        gate
        for node in plan.nodes
        for gate in gates_of(node)
        if not gate.passed and gate.gate.on_fail == "warn"
    ]
    for gate in warnings:
        told = f"{gate.summary}. {gate.meaning}".strip()
        console.print(f"[yellow]gate failed (warn)[/] {escape(told)}", highlight=False)
    if (page := plan.folder / "report.html").exists():
        say(f"report: {page}", console)


def stages_table(nodes: Sequence[Node], statuses: Mapping[str, str]) -> Table:
    """Returns a table with a row for each stage: status, seconds, a summary of its gates, and the metrics
    that matter for its kind."""
    table = table_of(
        "stage",
        "status",
        "seconds",
        "gates",
        "metrics",
        whole=("stage", "status", "gates"),
        right=("seconds",),
    )
    for node in nodes:
        result = RunDir(node.run_dir).result()
        status = statuses[node.name]
        shown = (
            [f"{name} {result.metrics[name]:.4g}" for name in main_metrics(node, result.metrics)]
            if result
            else []
        )
        seconds = f"{result.seconds:.0f}" if result else ""
        cells = (
            f"[{COLOURS.get(status, 'yellow')}]{status}[/]",
            seconds,
            gates_in_words(gates_of(node)),
            escape(", ".join(shown)),
        )
        table.add_row(escape(node.name), *cells)
    return table


def main_metrics(node: Node, found: Mapping[str, float]) -> list[str]:
    """Returns the names of the stage's metrics to show: each model's win rate for an evaluation, and for
    other kinds at most SHOWN of the main metrics and the metrics with gates."""
    if isinstance(node.config, Evaluation):
        return [name for name in (f"win_rate/{model}" for model in node.config.models) if name in found]
    main = KINDS[node.kind].main_metrics(node.config.model_dump(mode="json"))
    gated = [gate.metric for gate in node.config.gates]
    present = [name for name in main if name in found]
    known = [name for name in dict.fromkeys((*present[:1], *gated, *present)) if name in found]
    return known[:SHOWN]


def gates_in_words(verdicts: Sequence[Verdict]) -> str:
    """Returns, as markup, how many of a stage's gates failed or wait, such as `1 failed`, or else how many
    passed; "" without gates."""
    colours = {"failed": "red", "waits": "yellow"}
    counts = {word: sum(verdict.word == word for verdict in verdicts) for word in colours}
    told = ", ".join(f"[{colours[word]}]{count} {word}[/]" for word, count in counts.items() if count)
    if told or not verdicts:
        return told
    return f"[green]{len(verdicts)} passed[/]"
