"""Several teachers of one policy: which answers each scores, their order, and the KL to each."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.row_teachers import places_by_teacher, require_teachers, teacher_problem
from rlhf_core.stages.ppo import fleet, train
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.rewards.credit import divergence
from rlhf_core.stages.ppo.roles.teacher_scores import scorings_of
from rlhf_core.stages.ppo.rollout_records import Rollout
from tests.support.fleet_config import no_sources

FIELDS = {
    "reference": "org/general",
    "reward": "none",
    "advantage_estimator": "reinforce_pp",
    "init_kl_coef": 1.0,
    "prompts": {"sources": "prompts.jsonl"},
}
TEACHERS = {"math": "org/math", "code": "sft"}
MARKS = {"reference": 0.0, "teacher:math": -1.0, "teacher:code": -2.0, "actor": -3.0}


def ppo(**changes: Any) -> PPO:
    return PPO.model_validate(FIELDS | {"teachers": TEACHERS} | changes)


def rollout(token: int, teacher: str | None, length: int = 2) -> Rollout:
    tokens = [7, *[token] * length]
    prompt = Prompt((), [7], {} if teacher == "" else {"teacher": teacher}, False)
    zeros = np.zeros(len(tokens), np.float32)
    return Rollout(prompt, Document(tokens, [False, *[True] * length]), zeros, True)


class Scorer:
    """Stands for a group with two ranks: each log-prob is the group's mark, minus a hundredth of the token."""

    def __init__(self, name: str):
        self.name = name
        self.scored: list[int] = []

    def call(self, phase: str, method: Any, documents: list[Document]) -> Any:
        tokens = [document.tokens[-1] for document in documents]
        self.scored += tokens
        values = [np.full(len(d), MARKS[self.name] - d.tokens[-1] / 100, np.float32) for d in documents]
        pairs = list(enumerate(values))
        return SimpleNamespace(wait=lambda timeout: [pairs[1::2], pairs[::2]], refs=[object()])


def scored_by(
    rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[list[float], dict[str, list[int]]]:
    """Returns the last log-prob of each rollout, and the tokens that each group scored."""
    monkeypatch.setattr(fleet, "put_on_nodes", lambda documents: documents)
    config = ppo(**changes)
    groups = {name: Scorer(name) for name in config.groups}
    teachers = {name: groups[f"teacher:{name}"] for name in config.teachers}
    made: Any = Fleet(
        config, groups["actor"], None, groups.get("reference"), no_sources(None), None, teachers=teachers
    )  # type: ignore[arg-type]
    pending = made._start_models(rollouts, [], fleet.Turns(False))["ref_logprobs"]
    found = fleet.in_order(pending.wait(1.0))
    assert list(pending.refs) == []
    return [float(values[-1]) for values in found], {name: group.scored for name, group in groups.items()}


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_each_answer_is_scored_once_by_its_own_teacher_and_the_order_stays(
    lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["code", None, "math", "", "math", "code", "math"]
    rollouts = [rollout(i, name) for i, name in enumerate(names)]
    plain = "reference" if lora is None else "actor"
    changes = {} if lora is None else {"lora": lora, "reference": None, "reward": "a.py:f"}
    values, scored = scored_by(rollouts, monkeypatch, **changes, dtype="float32")
    groups = [f"teacher:{name}" if name else plain for name in names]
    assert values == pytest.approx([MARKS[group] - i / 100 for i, group in enumerate(groups)], abs=1e-6)
    assert (scored["teacher:code"], scored["teacher:math"]) == ([0, 5], [2, 4, 6])
    assert [token for token in scored[plain] if token in (1, 3)] == [1, 3]


@pytest.mark.parametrize("name", [None, "math"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_teacher_without_an_answer_does_not_score(
    name: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, scored = scored_by([rollout(i, name) for i in range(count)], monkeypatch)
    own = f"teacher:{name}" if name else "reference"
    assert scored[own] == list(range(count))
    assert not scored["teacher:code"] and len(values) == count


def test_the_kl_to_each_teacher_is_over_the_tokens_of_its_own_answers() -> None:
    rollouts = [rollout(1, "math", 3), rollout(2, None, 1), rollout(3, "math", 1)]
    own = [np.full(len(each.document), -1, np.float32) for each in rollouts]
    teachers = [np.full(len(row), gap - 1, np.float32) for row, gap in zip(own, (-1, -8, -5), strict=True)]
    metrics = divergence(rollouts, own, teachers, [0, 1, 2], 1.0, ppo()).metrics
    assert metrics["kl/teacher/math"] == pytest.approx((3 * 1 + 5) / 4)
    assert metrics["kl/mean"] == pytest.approx((3 * 1 + 8 + 5) / 5)
    assert "kl/teacher/code" not in metrics
    assert divergence(rollouts, own, teachers, [1, 2], 1.0, ppo()).metrics["kl/teacher/math"] == 5
    assert not [name for name in divergence(rollouts, own, teachers, [0], 1.0, ppo(teachers={})).metrics
                if name.startswith("kl/teacher")]  # fmt: skip


def test_each_group_scores_its_share_of_the_answers() -> None:
    rows = [{"teacher": "math"}, {"teacher": "math"}, {}, {"teacher": None}]
    found = scorings_of(ppo(), rows)
    assert [found[name] for name in ("reference", "teacher:math", "teacher:code")] == [0.5, 0.5, 0]
    assert scorings_of(ppo(teachers={}), rows)["reference"] == 1
    config = ppo(lora={"rank": 2}, reference=None, reward="a.py:f")
    assert scorings_of(config, rows)["actor"] == config.scores_actor + 0.5
    # before a run, each has an equal share
    assert math.isclose(config.scorings["actor"], config.scores_actor + 1 / 3)
    assert math.isclose(sum(ppo().scorings[name] for name in ppo().scorings if name != "actor"), 1)


def test_a_row_with_an_unknown_teacher_is_named() -> None:
    rows = [{"teacher": "math"}, {}, {"teacher": None}, {"teacher": "maths"}]
    told = "b: the row names the teacher 'maths', which the stage does not have: did you mean math?"
    assert teacher_problem(TEACHERS, [("a", rows[0]), ("b", rows[3])]) == told
    assert "7, which the stage does not have: write one of math, code" in teacher_problem(
        TEACHERS, [("a", {"teacher": 7})]
    )
    with pytest.raises(ValueError, match=r"^prompts: number 4: the row names the teacher 'maths'"):
        require_teachers(TEACHERS, rows)
    require_teachers(TEACHERS, rows[:3])
    require_teachers({}, rows)
    assert places_by_teacher({}, rows) == {"": [0, 1, 2, 3]}
    assert places_by_teacher(TEACHERS, []) == {}


def test_teachers_are_groups_beside_the_reference() -> None:
    gpu = {"gpus": 1}
    config = ppo(teachers={"math": {"model": "org/math", "ranks": {"num_ranks_per_node": 2}}, "code": "sft"})
    assert list(config.groups) == ["actor", "reference", "teacher:math", "teacher:code"]
    assert config.groups["teacher:math"].world_size == 2
    assert config.groups["teacher:code"] == config.reference_ranks
    shared = ppo(colocate_actor_ref=True, actor_ranks=gpu, reference_ranks=gpu)
    assert shared.together == [["actor", "reference", "teacher:math", "teacher:code"]]
    assert ppo(dtype="float16").dtype_in("teacher:math") == "float16"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"init_kl_coef": 0.0, "reward": "a.py:f"},
            "init_kl_coef is 0: set it above 0, or leave out teachers",
        ),
        ({"reset_reference_every": 2}, "teachers keep their own: leave one of them out"),
        ({"teachers": {"a/b": "sft"}}, "teachers.a/b"),
    ],
)
def test_teachers_without_a_use_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ppo(**changes)


@pytest.mark.parametrize("count", [None, 4])
def test_the_actor_must_know_the_tokens_that_any_teacher_may_name(
    count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(train, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(train, "writers", lambda *_: {})
    monkeypatch.setattr(
        train, "require_same_vocabulary", lambda own, others, _: compared.append((own, list(others)))
    )
    how = {"teacher_top_k": count, "kl_in": "reward" if count is None else "loss"}
    paths = {"actor": "a", "reference": "r", "teacher:math": "m", "teacher:code": "c"}
    train.load_vocabularies(ppo(**how), paths, False)
    back = [(path, ["a"]) for path in ("r", "m", "c")]
    assert compared == [("a", list(paths.values())), *(back if count else [])]
