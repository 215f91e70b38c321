"""Checks whether stages can use their questions, labels, labelled pairs and anchors. Reads only the first
rows of Hub data sets. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import Calibration, Data, Drift, Evaluation, Rewarded, RuleJudge, Select
from rlhf_core.config.gates import Asked
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.data.anchors import load_anchors
from rlhf_core.data.documents import Message, as_text
from rlhf_core.data.labels import load_labels
from rlhf_core.data.pictures.message_parts import marked_text, sources_in
from rlhf_core.data.pictures.picture_decoding import decoded
from rlhf_core.data.pictures.picture_source import PictureFault
from rlhf_core.data.questions import Question, cannot_see, load_questions
from rlhf_core.data.rows.columns import pictured_prompt_of
from rlhf_core.data.rows.mixture import check_columns, placed_rows
from rlhf_core.hub.ids import is_remote
from rlhf_core.recipe.plan import Node, Plan


def question_problems(node: Node, seed: int) -> list[str]:
    """Returns sentences, worded as in the stage, about missing labels and about faulty questions. A question
    is faulty if it lacks a prompt, repeats an id, or has no known answer for a rule judge."""
    config = node.config
    if isinstance(config, Calibration):
        return _refused_labels(config, f"stages.{node.name}.labels")
    if isinstance(config, Drift):
        return _anchor_problems(node.name, config, seed)
    if isinstance(config, Rewarded):
        return _pair_problems(node.name, config)
    if config.asks is None:
        return []
    source = config.asks.source
    where = f"stages.{node.name}.questions"
    try:
        if is_remote(source.path):
            check_columns(Data(sources=(source,)), "prompt")
            return []
        questions = load_questions(*config.asks, seed)
    except ValueError as error:
        return [f"{where}: {error}"]
    lacking = [
        _without_answer(questions, judge.answer_key)
        for judge in config.judges_of_answers
        if isinstance(judge, RuleJudge)
    ]
    pictured = [question for question in questions if question.pictures]
    if pictured and isinstance(config, Evaluation):
        lacking += [_undecodable(pictured), *cannot_see(config)]
    return [f"{where}: {told}" for told in lacking if told]


def _undecodable(questions: Sequence[Question]) -> str:
    """Returns a sentence about the first image that cannot be decoded, or "" if all can."""
    for question in questions:
        for source in question.pictures:
            try:
                decoded(source)
            except PictureFault as fault:
                return f"{question.where}: {fault}"
    return ""


def _pair_problems(stage: str, config: Rewarded) -> list[str]:
    """Returns sentences about missing files or columns of labelled pairs, for judges that serve as
    rewards."""
    problems = []
    judges = (source for source in config.reward if isinstance(source, JudgeReward))
    for labels in (judge.agreement for judge in judges if judge.agreement is not None):
        try:
            check_columns(Data(sources=(labels.data,)), "preference")
        except ValueError as error:
            problems.append(f"stages.{stage}.reward: {error}")
    return problems


def _refused_labels(config: Calibration, where: str) -> list[str]:
    try:
        load_labels(config.labels.path, config.max_labels)
    except ValueError as error:
        return [f"{where}: {error}"]
    return []


def shared_questions(plan: Plan) -> list[str]:
    """Returns sentences about PPO `eval_prompts` that are also questions of an evaluation. The best iteration
    would then be chosen with the questions that later judge it. Does not read Hub data sets."""
    judged = {
        node.name: _questions(node.config.asks, plan.recipe.seed) for node in plan.nodes if node.config.asks
    }
    problems = []
    for node in plan.nodes:
        held_out = next((text.data for text in node.config.texts if text.field == "eval_prompts"), None)
        if held_out is None or node.done or any(is_remote(source.path) for source in held_out.sources):
            continue
        try:
            rows = [placed.located for placed in placed_rows(held_out, plan.recipe.seed, "prompt")]
            asked = [_plain(pictured_prompt_of(located)) for located in rows]
        except (OSError, ValueError):  # reported elsewhere
            continue
        for name, questions in judged.items():
            shared = sum(text in questions for text in asked)
            if shared:
                problems.append(
                    f"stages.{node.name}.eval_prompts: {shared} of {len(asked)} prompts are questions of"
                    f" {name}, by which the model that they choose is judged: leave them out of one of"
                    " the two"
                )
    return problems


def selecting_questions(plan: Plan) -> list[str]:
    """Returns sentences about evaluations whose questions were also used to select one of their models. The
    model's win rate would be biased upwards, because it is the largest of several noisy win rates. Does not
    read Hub data sets."""
    judged = {node.name: node.config.asks for node in plan.nodes if node.config.asks}
    problems = []
    for node in plan.nodes:
        for behind in plan.ancestors((node,)) if node.name in judged and not node.done else ():
            by = behind.stages.get(behind.config.by) if isinstance(behind.config, Select) else None
            if by is None or by == node.name:
                continue
            ours, theirs = (_questions(judged[name], plan.recipe.seed) for name in (node.name, by))
            shared = len(ours & theirs)
            if shared:
                problems.append(
                    f"stages.{node.name}.questions: {shared} of {len(ours)} questions are those of {by}, by"
                    f" which {behind.name} chose its model: ask others here, or the win rate is too high"
                )
    return problems


def _anchor_problems(name: str, config: Drift, seed: int) -> list[str]:
    """Returns a sentence if anchors lack a prompt, an answer, a verdict, or a known answer for a rule
    judge."""
    if config.anchors is None or is_remote(config.anchors.pairs.path):
        return []
    where = f"stages.{name}.anchors.pairs"
    judge = config.anchors.judge
    try:
        questions = load_anchors(config.anchors.pairs, seed).questions
    except ValueError as error:
        return [f"{where}: {error}"]
    told = _without_answer(questions, judge.answer_key) if isinstance(judge, RuleJudge) else ""
    return [f"{where}: {told}"] if told else []


def _questions(asked: Asked, seed: int) -> set[str]:
    """Returns the questions, normalised in letter case and whitespace. Returns an empty set if they cannot be
    read here."""
    try:
        if is_remote(asked.source.path):
            return set()
        return {_plain(question.messages) for question in load_questions(*asked, seed)}
    except (OSError, ValueError):
        return set()


def _plain(messages: Sequence[Message]) -> str:
    """Returns the messages as text, normalised in letter case and whitespace, with the content of their
    images. Raises PictureFault if an image cannot be read."""
    text = as_text([{**message, "content": marked_text(message["content"])} for message in messages])
    images = [source.content_digest for source in sources_in(messages)]
    return " ".join([*text.lower().split(), *images])


def _without_answer(questions: Sequence[Question], key: str) -> str:
    """Returns the error about the first question without a known answer, or "" if all questions have one."""
    try:
        for question in questions:
            question.known_answer(key)
    except ValueError as error:
        return str(error)
    return ""
