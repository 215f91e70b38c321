"""Writes the page of a stage's recorded answers, `rollouts/STAGE-DIGEST.html` next to the report. It shows
answers by prompt, with the iterations of a prompt side by side.

The page has no script and loads nothing; its content security policy forbids both. It shows answers up to a
token limit and says how many it leaves out; the dashboard shows all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from evaluation.report.rollouts.answer_rows import RecordedAnswer, iteration_files, keys_of, read_answers
from evaluation.report.rollouts.answer_view import answers_html, legend_html, style_of_tokens
from evaluation.report.rollouts.token_turns import advantage_range
from evaluation.report.template import fill
from rlhf_core.runs.run_dir import ROLLOUTS, VALIDATION
from rlhf_core.system.files import write_text

FOLDER = "rollouts"  # beside the report
TITLES = {ROLLOUTS: "Answers", VALIDATION: "Validation answers"}
MAX_TOKENS = 40_000  # on a page, about 5 MB
MAX_ANSWERS = 400
MAX_ITERATIONS = 40  # whose files are read
OF_ITERATION = 24  # answers read from each iteration, those with the lowest keys
MAX_COLUMNS = 8  # iterations to choose from for a prompt


class PromptColumns(NamedTuple):
    """A prompt and its answers. `columns`: for each iteration its number, its answers as HTML, and whether
    the column is visible at first. `answers`: the number of answers."""

    prompt: str
    columns: list[tuple[int, Markup, bool]]
    answers: int


class RolloutPage(NamedTuple):
    """A page's title, its address relative to the report, and the numbers of answers and iterations that it
    shows."""

    title: str
    address: str
    answers: int
    iterations: int


def write_rollout_page(
    out_dir: Path, stage: str, run_dir: Path, folder: str = ROLLOUTS
) -> RolloutPage | None:
    """Writes the page of the answers in a stage's run directory. `folder`: as in `iteration_files`. Returns
    None for a stage without recorded answers."""
    files = iteration_files(run_dir, folder)
    numbers = spread(list(files), MAX_ITERATIONS)
    keys = {number: keys_of(files[number]) for number in numbers}
    answers = []
    for number, known in keys.items():
        wanted = set(sorted(set(known))[:OF_ITERATION])
        answers += list(islice(read_answers(number, files[number], wanted), OF_ITERATION))
    if not answers:
        return None
    chosen = within(answers)
    most = advantage_range(chosen)
    html = fill(
        "rollouts.html.j2",
        title=f"{TITLES[folder]} of {stage}",
        legend=legend_html() if any(answer.tokens for answer in chosen) else None,
        style=style_of_tokens(),
        most=most,
        prompts=prompts_of(chosen, most),
        shown=len(chosen),
        iterations=len({answer.iteration for answer in chosen}),
        recorded=sum(map(len, keys.values())),
        unread=len(files) - len(numbers),
        dashboard=f"/rollouts/{run_dir.name}" + ("" if folder == ROLLOUTS else f"?of={folder}"),
        columns=MAX_COLUMNS,
    )
    suffix = "" if folder == ROLLOUTS else f".{folder}"
    address = f"{FOLDER}/{run_dir.name}{suffix}.html"
    (out_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    write_text(out_dir / address, html)
    return RolloutPage(
        f"{TITLES[folder]} of {stage}", address, len(chosen), len({answer.iteration for answer in chosen})
    )


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` of the numbers, evenly spaced, including the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    step = (len(numbers) - 1) / (most - 1)
    return [numbers[round(i * step)] for i in range(most)]


def within(answers: Sequence[RecordedAnswer]) -> list[RecordedAnswer]:
    """Returns the answers that fit on the page, in order. Answers of the first and last iterations take
    precedence, then answers to the prompts that most iterations answered."""
    ends = {answers[0].iteration, answers[-1].iteration}
    of_key: dict[str, set[int]] = {}
    for answer in answers:
        of_key.setdefault(answer.key, set()).add(answer.iteration)
    order = sorted(
        range(len(answers)),
        key=lambda i: (answers[i].iteration not in ends, -len(of_key[answers[i].key]), i),
    )
    left = MAX_TOKENS
    chosen: list[int] = []
    for i in order[:MAX_ANSWERS]:
        tokens = answers[i].tokens
        size = len(tokens.ids) if tokens else 0
        if size <= left or not chosen:
            left -= size
            chosen.append(i)
    return [answers[i] for i in sorted(chosen)]


def prompts_of(answers: Sequence[RecordedAnswer], most: float) -> list[PromptColumns]:
    """Returns the answers by prompt, starting with the prompts that most iterations answered."""
    by_key: dict[str, dict[int, list[RecordedAnswer]]] = {}
    for answer in answers:
        by_key.setdefault(answer.key, {}).setdefault(answer.iteration, []).append(answer)
    ordered = sorted(by_key.values(), key=lambda by_iteration: -len(by_iteration))
    found = []
    for by_iteration in ordered:
        numbers = spread(list(by_iteration), MAX_COLUMNS)
        ends = {numbers[0], numbers[-1]}
        columns = [(at, answers_html(by_iteration[at], most), at in ends) for at in numbers]
        prompt = by_iteration[numbers[0]][0].prompt
        found.append(PromptColumns(prompt, columns, sum(len(by_iteration[at]) for at in numbers)))
    return found
