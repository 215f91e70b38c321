"""Whether an evaluation can use its questions. Torch-free; of a Hub data set only the first rows are read."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import Data, Evaluation, RuleJudge
from rlhf_core.data.questions import Question, load_questions
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.hub.ids import is_remote
from rlhf_core.recipe.plan import Node


def question_problems(node: Node, seed: int) -> list[str]:
    """Says when questions lack a prompt or repeat an id, as the stage does, or have no known answer for a rule judge."""
    config = node.config
    if not isinstance(config, Evaluation):
        return []
    source, where = config.questions, f"stages.{node.name}.questions"
    try:
        if is_remote(source.path):
            check_columns(Data(sources=(source,)), "prompt")
            return []
        questions = load_questions(source, config.max_questions, seed)
    except ValueError as error:
        return [f"{where}: {error}"]
    lacking = (_without_answer(questions, judge.answer_key) for judge in config.judges if isinstance(judge, RuleJudge))
    return [f"{where}: {told}" for told in lacking if told]


def _without_answer(questions: Sequence[Question], key: str) -> str:
    """Says what the first question without a known answer lacks; "" when all have one."""
    try:
        for question in questions:
            question.known_answer(key)
    except ValueError as error:
        return str(error)
    return ""
