"""Builds the data reports of a recipe's stages without training. Needs the data files and tokenizers, but no
GPU."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.data import Text
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import surveys_of
from rlhf_core.data.sources import (
    answer_documents,
    labelled_answers,
    preference_pairs,
    prompts,
    sft_documents,
)
from rlhf_core.data.survey import DataReport, Survey
from rlhf_core.preflight.inputs import tokenizer_of
from rlhf_core.recipe.plan import Node, Plan


def examine(plan: Plan) -> Iterator[tuple[str, dict[str, Survey], list[str]]]:
    """Yields each stage that reads data files: its name, the surveys of its data sets, and one sentence for
    each data set that the stage would reject. Yields rounds of a loop that read the same data only once.

    Skips evaluations and data that other stages generate (pairs, answers).
    """
    seen: set[str] = set()
    for node in plan.nodes:
        parts = () if node.config.asks else tuple(node.config.texts)
        place = tokenizer_of(plan, node) if parts else None
        key = repr((place, parts))
        if place is not None and key not in seen:
            seen.add(key)
            reports = dict[str, DataReport]()
            wrong = list[str]()
            for text in parts:
                try:
                    reports[text.field] = _report(plan, node, text, place)
                except ValueError as error:
                    wrong.append(f"stages.{node.name}.{text.field}: {error}")
            yield node.name, surveys_of(reports), wrong


def _report(plan: Plan, node: Node, text: Text, place: str) -> DataReport:
    renderer = Renderer(
        load_tokenizer(place, plan.recipe.trust_remote_code),
        text.data.template,
        template_args=text.data.template_args,
    )
    seed = plan.recipe.seed
    if text.rows == "prompt":
        return prompts(text.data, renderer, text.limit, seed).report
    if text.rows == "scored":
        return answer_documents(text.data, renderer, text.limit, seed, "reward").documents.report
    if text.rows == "labelled":
        return labelled_answers(text.data, renderer, text.limit, seed).report
    load = sft_documents if text.rows == "sft" else preference_pairs
    return load(text.data, renderer, text.limit, seed).report
