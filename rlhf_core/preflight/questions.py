"""Whether an evaluation can use its questions. Torch-free; of a Hub data set only the first rows are read."""

from __future__ import annotations

from rlhf_core.config import Data, Evaluation, RuleJudge
from rlhf_core.data.questions import load_questions
from rlhf_core.data.rows import check_columns
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
    keys = [judge.answer_key for judge in config.judges if isinstance(judge, RuleJudge)]
    lacking = [key for key in keys if any(key not in question.row for question in questions)]
    return [f"{where}: {source.path} has rows without the column {key!r}; set answer_key of the rule judge" for key in lacking]
