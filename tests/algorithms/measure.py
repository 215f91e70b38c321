"""The objective of an algorithm before and after, item by item on held-out data, so that the rise has a
standard error.

answers       log-prob a token of held-out answers (nats); before: the random base model ranking
held-out pairs the reward model ranks right (share); before: chance, 0.5 margin        log-prob of the chosen
minus that of the rejected answer of held-out pairs (nats); `mean margin`: a token reward        weighed sum
of the recipe's own rewards of one answer to each held-out question, before any standardisation All but the
first two compare with the SFT model that the algorithm starts from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import Case

from evaluation.answers.local_answers import file_name
from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.sources import preference_pairs, sft_documents
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.records import StageResult
from rlhf_core.rewards.batch import reward_batch
from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.rewards.reward_server import AnswerToScore, document
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.reference_logprobs import answer_logprobs

MICRO = 64
CLEAR = 3.0  # standard errors that a rise must exceed
MAX_LEN = 128


class Measured(NamedTuple):
    """Means over the items, the standard error of the mean difference, the share of right answers before and
    after, seconds of work."""

    before: float
    after: float
    error: float
    items: int
    right: tuple[float, float] | None
    seconds: float

    @property
    def learned(self) -> bool:
        return self.after - self.before > CLEAR * self.error


def measure(case: Case) -> Measured:
    """Reads a finished run. RuntimeError when a stage of it is not done."""
    planned = case.plan()
    before, after = {"answers": _answers, "ranking": _ranking, "reward": _rewards}.get(
        case.objective, _margins
    )(case, planned)
    rises = after - before
    error = float(rises.std(ddof=1)) / len(rises) ** 0.5
    seconds = sum(_result(node).seconds for node in planned.stages_of(case.stage))
    return Measured(
        float(before.mean()), float(after.mean()), error, len(rises), _right(case, planned), seconds
    )


def _answers(case: Case, planned: Plan) -> tuple[np.ndarray, np.ndarray]:
    data = _config(planned["sft"]).eval_data
    before = planned["sft"].models["base"]
    after = _checkpoint(planned["sft"])
    documents = sft_documents(data, _renderer(after), MAX_LEN, 0).items
    return _logprobs(before, documents, True), _logprobs(after, documents, True)


def _ranking(case: Case, planned: Plan) -> tuple[np.ndarray, np.ndarray]:
    path = _checkpoint(planned[case.stage])
    documents = _held_out_pairs(_config(planned[case.stage]).eval_data, path)
    chosen, rejected = np.array(RewardScorer(path, "float32", MICRO).score(documents)).reshape(2, -1)
    right = (np.sign(chosen - rejected) + 1) / 2
    return np.full(len(right), 0.5), right


def _margins(case: Case, planned: Plan) -> tuple[np.ndarray, np.ndarray]:
    data = _config(planned[case.stage]).eval_data
    documents = _held_out_pairs(data, _checkpoint(planned["sft"]))

    def margin(path: str) -> np.ndarray:
        chosen, rejected = _logprobs(path, documents, case.objective == "mean margin").reshape(2, -1)
        return chosen - rejected

    return margin(_checkpoint(planned["sft"])), margin(_checkpoint(planned[case.stage]))


def _rewards(case: Case, planned: Plan) -> tuple[np.ndarray, np.ndarray]:
    """By the sources of the stage that used them; nothing is standardised, as running statistics would not be
    of one scale."""
    node = next(node for node in planned.stages_of(case.stage) if hasattr(node.config, "reward"))
    sources = [source.model_copy(update={"normalize": "none"}) for source in _config(node).reward]
    renderer = _renderer(_checkpoint(planned["sft"]))

    def rewards(model: str) -> np.ndarray:
        rows = [json.loads(line) for line in _answer_file(planned, model).read_text().splitlines()]
        answers = [
            AnswerToScore(
                row["messages"][:-1], row["messages"][-1]["content"]["answer"], not row["answer_truncated"]
            )
            for row in rows
        ]
        documents = [document(renderer, each) for each in answers]
        samples = [Sample(each.prompt, each.response, {}, each.finished, "") for each in answers]
        return (
            reward_batch(sources, planned.inputs(node), documents, samples, 0.0, MICRO)
            .rewards.double()
            .numpy()
        )

    return rewards("sft"), rewards(_judged(case, planned))


def _logprobs(path: str, documents: Sequence[Document], mean: bool) -> np.ndarray:
    policy = load_policy(path, "float32").eval()
    pad = load_tokenizer(path).pad_token_id
    parts = [documents[i : i + MICRO] for i in range(0, len(documents), MICRO)]
    with torch.no_grad():
        return np.concatenate(
            [answer_logprobs(policy, part, pad, mean, torch.device("cpu")).double().numpy() for part in parts]
        )


def _held_out_pairs(data: Data, path: str) -> list[Document]:
    """All chosen documents, then all rejected ones."""
    pairs = preference_pairs(data, _renderer(path), MAX_LEN, 0).items
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def _right(case: Case, planned: Plan) -> tuple[float, float] | None:
    model = _judged(case, planned)
    metrics: dict[str, Any] = _result(planned["evaluation"]).metrics
    return (
        (metrics["right/sft"], metrics[f"right/{model}"])
        if f"right/{model}" in metrics and model != "sft"
        else None
    )


def _judged(case: Case, planned: Plan) -> str:
    """The name that the evaluation gives the model of the stage; of a loop the last round's."""
    models = _config(planned["evaluation"]).models
    stage = planned[case.stage].name
    return next((model for model in models if planned[model].name == stage), case.stage)


def _answer_file(planned: Plan, model: str) -> Path:
    node = planned["evaluation"]
    return node.run_dir / _result(node).outputs["report"] / "answers" / f"{file_name(model)}.jsonl"


def _config(node: Node) -> Any:
    """The stage's config: which kind it is, the case says."""
    return node.config


def _checkpoint(node: Node) -> str:
    return str(node.run_dir / _result(node).outputs["checkpoint"])


def _result(node: Node) -> StageResult:
    result = RunDir(node.run_dir).result()
    if result is None:
        raise RuntimeError(f"the stage {node.name} is not done: there is no result in {node.run_dir}")
    return result


def _renderer(path: str) -> Renderer:
    return Renderer(load_tokenizer(path), "chat")
