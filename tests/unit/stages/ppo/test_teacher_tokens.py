"""`teacher_top_k`: what the reference says of its most probable tokens, how it comes to the actor, and the step
on the KL to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.objectives.actor_loss import ResponseCounts
from rlhf_core.objectives.losses import teacher_loss
from rlhf_core.preflight.model_checks import vocabulary_problems
from rlhf_core.rewards.clients import Rewards
from rlhf_core.stages.ppo import fleet
from rlhf_core.stages.ppo.by_reference import by_reference, joined, read_by
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec, passes_of, teacher_rows
from rlhf_core.stages.ppo.roles.trained import Update
from rlhf_core.stages.ppo.rollout_records import Experience, Scores, StoredColumn, TeacherTokens, join_scores
from tests.support.fleet_config import fleet_config, no_sources
from tests.support.tiny_roles import (
    actor,
    credited,
    documents,
    experience,
    flat,
    model,
    models,
    plain_engine,
    ppo,
)

__all__ = ["models", "plain_engine"]  # fixtures
HEAT = 0.8
FIELDS = {
    "reference": "teacher",
    "kl_in": "loss",
    "temperature": HEAT,
    "teacher_top_k": 5,
    "init_kl_coef": 1.0,
}
ALL = list(range(8))


def taught(models: Path, count: int = 5, teacher: str = "other") -> list[Experience]:
    """Experience without advantages, and the teacher's tokens."""
    items = experience(models, scale=0.0)
    docs = [item.document for item in items]
    found = dict(ReferenceModel(model(models / teacher), HEAT).top_tokens(docs, count))
    return [replace(item, teacher=found[i], ref_logprobs=None) for i, item in enumerate(items)]


def whole_kls(models: Path, items: Sequence[Experience]) -> np.ndarray:
    """The reverse KL of the whole distributions of `sft` and `other`, at each token of all answers."""
    kls = []
    for item in items:
        tables = []
        for name in ("sft", "other"):
            loaded = AutoModelForCausalLM.from_pretrained(models / name)
            with torch.no_grad():
                logits = loaded(torch.tensor([list(item.document.tokens)])).logits[0, :-1]
            tables.append(torch.log_softmax(logits.double() / HEAT, -1))
        own, other = tables
        kl = (own.exp() * (own - other)).sum(-1).numpy()
        kls.append(kl[item.document.mask_array[1:]])
    return np.concatenate(kls)


def test_the_reference_says_its_most_probable_tokens_of_the_answers(models: Path, plain_engine: None) -> None:
    docs = documents(6, seed=3)
    reference = ReferenceModel(model(models / "other"), HEAT)
    own = dict(reference.logprobs(docs))
    loaded = AutoModelForCausalLM.from_pretrained(models / "other")
    found = dict(reference.top_tokens(docs, 4))
    assert sorted(found) == list(range(6))
    for i, document in enumerate(docs):
        answer = document.mask_array
        n = int(answer.sum())
        teacher = found[i]
        np.testing.assert_allclose(teacher.own, own[i], atol=1e-6)
        assert teacher.ids.shape == (n, 4) and teacher.logprobs.shape == (n, 5)
        np.testing.assert_allclose(np.exp(teacher.logprobs).sum(-1), 1, atol=1e-5)
        with torch.no_grad():
            logits = loaded(torch.tensor([list(document.tokens)])).logits[0, :-1]
        best = torch.log_softmax(logits / HEAT, -1)[answer[1:]].topk(4, -1)
        assert (teacher.ids == best.indices.numpy()).all()
        np.testing.assert_allclose(teacher.logprobs[:, :-1], best.values.numpy(), atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 31])
def test_the_first_step_reports_the_kl_of_the_distributions(
    count: int, models: Path, plain_engine: None
) -> None:
    """Mean over the tokens of answers alone, equal to that of the whole distributions with all 31 tokens."""
    items = taught(models, count)
    whole = whole_kls(models, items).mean()
    (step,) = actor(models, micro=3, **FIELDS).train(items, [Update(ALL, 1e-3, 1.0)]).metrics
    assert "policy/kl_loss" not in step
    if count == 31:
        assert step["policy/teacher_kl"] == pytest.approx(whole, rel=1e-4)
        assert step["policy/loss"] == 0, "the surrogate has no advantages"
    else:
        assert 0 < step["policy/teacher_kl"] < 0.999 * whole


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_passes_and_packing_change_nothing(aggregation: str, models: Path, plain_engine: None) -> None:
    items = taught(models)
    found = []
    for micro, tokens in ((8, None), (3, None), (1, None), (8, 40)):
        config = ppo(loss_aggregation=aggregation, **FIELDS)
        spec = ModelSpec(str(models / "sft"), "float32", 0, 8, False, tokens)
        trained = Actor(spec, config.model_copy(update={"micro_train_batch_size": micro}), 0)
        if tokens:
            trained.passes = passes_of(trained.engine, micro, tokens)
        metrics = trained.update([items[i] for i in (3, 1, 0, 7)], Update([], 1e-2, 1.0), [])
        found.append((metrics["policy/teacher_kl"], metrics["policy/grad_norm"], flat(trained)))
    for kl, norm, weights in found[1:]:
        assert kl == pytest.approx(found[0][0], rel=1e-4) and norm == pytest.approx(found[0][1], rel=1e-3)
        torch.testing.assert_close(weights, found[0][2], atol=1e-3, rtol=0)


def test_steps_lower_the_kl_and_a_teacher_that_is_the_actor_moves_nothing(
    models: Path, plain_engine: None
) -> None:
    pulled = actor(models, **FIELDS)
    steps = pulled.train(taught(models), [Update(ALL, 1e-2, 1.0)] * 6).metrics
    assert steps[-1]["policy/teacher_kl"] < 0.6 * steps[0]["policy/teacher_kl"]
    (still,) = actor(models, **FIELDS).train(taught(models, 5, "sft"), [Update(ALL, 1e-2, 1.0)]).metrics
    assert abs(still["policy/teacher_kl"]) < 1e-5 and still["policy/grad_norm"] < 1e-4
    assert steps[0]["policy/grad_norm"] > 1e-2


def test_the_coefficient_multiplies_the_gradient(models: Path, plain_engine: None) -> None:
    norms = [
        actor(models, **FIELDS)
        .train(taught(models), [Update(ALL, 1e-2, coef)])
        .metrics[0]["policy/grad_norm"]
        for coef in (1.0, 0.25, 0.0)
    ]
    assert norms == pytest.approx([norms[0], norms[0] / 4, 0.0], rel=1e-3)


def test_tokens_off_the_mask_do_not_count() -> None:
    kl = torch.tensor([[9.0, 1.0, float("nan"), 3.0]], requires_grad=True)
    mask = torch.tensor([[False, True, False, True]])
    counted = ResponseCounts(2.0, 1.0)
    found = teacher_loss(kl, mask, counted.tokens)
    assert found.loss == 2.0 and found.metrics["policy/teacher_kl"] == 2.0
    found.loss.backward()
    assert kl.grad is not None and kl.grad.tolist() == [[0, 0.5, 0, 0.5]]


def test_credit_sends_the_teacher_and_no_log_probs_of_it() -> None:
    found = credited(ppo(**FIELDS))
    assert all(one.ref_logprobs is None and one.teacher is None for one in found.experience)
    estimated = credited(ppo(**{**FIELDS, "teacher_top_k": None, "kl_estimator": "k3"}))
    assert all(one.ref_logprobs is not None for one in estimated.experience)


def teacher_of(length: int, value: int) -> TeacherTokens:
    ids = np.full((length - 1, 2), value, np.int32)
    return TeacherTokens(np.zeros(length, np.float32), ids, np.zeros((length - 1, 3), np.float32))


def test_it_goes_to_the_actor_by_reference_and_not_to_the_critic() -> None:
    docs = documents(3)
    teachers = [teacher_of(len(d) - 1, i) for i, d in enumerate(docs)]
    whole = [Experience(d, None, None, None, None, 0.5, None, t) for d, t in zip(docs, teachers, strict=True)]
    pairs = list(enumerate(teachers))
    stored = [StoredColumn("teacher", 0, True, (share, 1.0)) for share in (pairs[1::2], pairs[::2])]
    left, held = by_reference(whole, stored, 1)
    assert all(one.teacher is None for one in left)
    assert [one.teacher for one in joined(left, *read_by("actor", held))] == teachers
    assert read_by("critic", held) == ([], [])
    none = Rewards({"score": np.zeros(1)}, {})
    parts = [Scores(None, None, None, none, teacher=[one]) for one in teachers]
    assert join_scores(parts, 0).teacher == teachers


def test_teachers_of_other_documents_or_vocabularies_are_refused(models: Path) -> None:
    docs = documents(2)
    items = [Experience(d, None, None, None, None, 0.0, None, teacher_of(len(d) - 1, 40)) for d in docs]
    device = torch.device("cpu")
    rows = teacher_rows(items, 41, device)
    assert rows is not None and rows.ids.shape == (sum(len(d) - 2 for d in docs), 2)
    with pytest.raises(
        ValueError, match="token 40 is among the teacher's most probable ones, and the actor has 31"
    ):
        teacher_rows(items, 31, device)
    with pytest.raises(AssertionError, match="teachers are of other documents"):
        teacher_rows([items[0], replace(items[1], teacher=teacher_of(20, 1))], 41, device)
    assert teacher_rows([replace(one, teacher=None) for one in items], 41, device) is None


def test_the_fleet_asks_the_reference_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "put_on_nodes", lambda value: value)
    teachers = [teacher_of(3, 1)]
    called: list[Any] = []

    class Reference:
        def call(self, phase: str, method: Any, *given: Any) -> Any:
            called.append((method, given[1:]))
            return SimpleNamespace(refs=["there"], wait=lambda timeout: [[(0, teachers[0])]])

    config = fleet_config(scores_actor=False, teacher_top_k=7)
    made: Any = Fleet(config, None, None, Reference(), no_sources(None), None)  # type: ignore[arg-type]
    rollout: Any = SimpleNamespace(document=documents(1)[0], sampler_logprobs=np.zeros(3), finished=True)
    scores = made.start_score([rollout], Rewards({"score": np.zeros(1)}, {}), 0)()
    assert called == [(ReferenceModel.top_tokens, (7,))]
    assert scores.teacher == teachers and scores.ref_logprobs[0] is teachers[0].own
    assert [column.field for column in scores.stored] == ["document", "teacher"]


@pytest.mark.parametrize("count", [None, 5])
def test_a_teacher_with_further_tokens_is_refused_before_work(count: int | None) -> None:
    """Log-probs of sampled tokens need no more than the actor's tokens."""
    estimator = {"kl_estimator": "k3" if count is None else "k1"}
    teachers = {"math": {"model": "teacher"}}
    config = ppo(**{**FIELDS, **estimator, "teacher_top_k": count, "teachers": teachers})
    node: Any = SimpleNamespace(kind="ppo", name="ppo", config=config)
    unlike = {("teacher", "sft"): "sft has no such token"}
    told = vocabulary_problems(node, lambda name: name, lambda own, other: unlike.get((own, other)))
    where = [] if count is None else ["reference", "teachers.math"]
    assert told == [f"stages.ppo.{place}: sft has no such token" for place in where]
