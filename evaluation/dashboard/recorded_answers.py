"""Selects the answers for the page of a stage's recorded answers: the answers of one iteration by prompt, or
of two iterations to one prompt. Reads only the files of these iterations and an index of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from evaluation.dashboard.artifacts_folder import Folder, Missing
from evaluation.report.rollouts.answer_rows import RecordedAnswer, iteration_files, read_answers
from evaluation.report.rollouts.answer_view import answers_html
from evaluation.report.rollouts.rollout_page import spread
from evaluation.report.rollouts.token_turns import advantage_range
from rlhf_core.runs.run_dir import ROLLOUTS, VALIDATION

MAX_ANSWERS = 16  # in each of a page's two columns
MAX_TOKENS = 40_000  # likewise; a longer answer is shown alone
MAX_LINKS = 40  # to other iterations
MAX_OTHERS = 12  # other iterations whose answers to the prompt can be shown beside
INDEX_BYTES = 1 << 30  # total size of the files searched for other iterations of a prompt


class PromptAnswers(NamedTuple):
    """A prompt, and its answers as HTML by iteration. `others`: other iterations that answered the prompt."""

    key: str
    prompt: str
    columns: list[tuple[int, Markup]]
    others: list[int]


class RecordedPage(NamedTuple):
    """The contents of the page: `iteration` out of `iterations`, and `shown` of its `answers`, at most
    `step`, starting with index `first`. `most`: the largest absolute advantage. `unsearched`: the number of
    iterations that were not searched for other answers to a prompt."""

    iteration: int
    iterations: list[int]
    first: int
    answers: int
    shown: int
    step: int
    most: float
    prompts: list[PromptAnswers]
    unsearched: int


def recorded_page(folder: Folder, run_dir: Path, query: Mapping[str, str]) -> RecordedPage | None:
    """Returns the page for a query: `of` (`folder_of`), `iteration` (default: the last), `from` (the first
    answer, from 1), or `prompt` and `beside` (another iteration). Returns None if no answers are recorded.
    Raises Missing for an iteration that is not recorded."""
    files = iteration_files(run_dir, folder_of(query))
    if not files:
        return None
    iteration, beside = chosen_iterations(run_dir, query)
    places, unsearched = index(folder, files)
    keys = {query["prompt"]} if query.get("prompt") else set()
    count = sum(not keys or key in keys for key in folder.keys(files[iteration]))
    first = min(max(0, number_of(query.get("from", ""), 1) - 1), max(0, count - 1))
    shown = fitting(islice(read_answers(iteration, files[iteration], keys), first, None))
    compared: list[RecordedAnswer] = []
    if keys and beside != iteration:
        compared = fitting(read_answers(beside, files[beside], keys))
    most = advantage_range([*shown, *compared])
    prompts = []
    for of_key, group in groupby(shown, key=lambda answer: answer.key):
        own = list(group)
        columns = [(iteration, answers_html(own, most))]
        if compared:
            columns.append((beside, answers_html(compared, most)))
            columns.sort(key=lambda column: column[0])
        others = [at for at in places.get(of_key, ()) if at != iteration]
        prompts.append(PromptAnswers(of_key, own[0].prompt, columns, spread(others, MAX_OTHERS)))
    listed = sorted({*spread(list(files), MAX_LINKS), *neighbours(list(files), iteration)})
    return RecordedPage(iteration, listed, first, count, len(shown), MAX_ANSWERS, most, prompts, unsearched)


def fitting(answers: Iterable[RecordedAnswer]) -> list[RecordedAnswer]:
    """Returns as many of the first answers as fit on a page."""
    shown: list[RecordedAnswer] = []
    left = MAX_TOKENS
    for answer in islice(answers, MAX_ANSWERS):
        left -= len(answer.tokens.ids) if answer.tokens else 0
        if shown and left < 0:
            break
        shown.append(answer)
    return shown


def folder_of(query: Mapping[str, str]) -> str:
    """Returns the folder that a query requests: the folder of validations for `of=validation`, otherwise the
    folder of rollouts."""
    return VALIDATION if query.get("of") == VALIDATION else ROLLOUTS


def chosen_iterations(run_dir: Path, query: Mapping[str, str]) -> tuple[int, int]:
    """Returns the iteration that a query requests, and the iteration to show next to it, which may be the
    same; (0, 0) if none is recorded. Raises Missing if either is not recorded."""
    files = iteration_files(run_dir, folder_of(query))
    iteration = number_of(query.get("iteration", ""), max(files, default=0))
    beside = number_of(query.get("beside", ""), iteration)
    if files and not {iteration, beside} <= files.keys():
        raise Missing(f"iteration {iteration} or {beside}")
    return iteration, beside


def index(folder: Folder, files: Mapping[int, Path]) -> tuple[dict[str, list[int]], int]:
    """Returns the iterations that answered each prompt, by key, and the number of iterations that were not
    searched because the files would exceed INDEX_BYTES."""
    found: dict[str, list[int]] = {}
    left = INDEX_BYTES
    unsearched = 0
    for iteration, file in files.items():
        left -= size_of(file)
        if left < 0:
            unsearched += 1
            continue
        for key in dict.fromkeys(folder.keys(file)):
            found.setdefault(key, []).append(iteration)
    return found, unsearched


def neighbours(numbers: list[int], number: int) -> list[int]:
    """Returns a number and the numbers before and after it in the list."""
    place = numbers.index(number)
    return numbers[max(0, place - 1) : place + 2]


def number_of(text: str, default: int) -> int:
    """Parses a number in a query string. Returns `default` for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


def size_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0
