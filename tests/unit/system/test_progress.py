"""Where progress is counted: each pass, group of weights and step of an engine, and bytes of states and models while they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.data.documents import Document
from rlhf_core.models.load import load_policy
from rlhf_core.models.weights import checkpoint_weights
from rlhf_core.objectives.actor_loss import Objective
from rlhf_core.objectives.losses import Loss
from rlhf_core.rollout import vllm_patches
from rlhf_core.rollout.engine import Sampler, Sampling
from rlhf_core.rollout.weight_transfer import Broadcast, Rendezvous
from rlhf_core.stages.ppo import roles
from rlhf_core.system import progress
from rlhf_core.training.engine import AdamW
from rlhf_core.training.train_loop import accumulate


def counted(work: Callable[[], Any]) -> int:
    before = progress._steps
    work()
    return progress._steps - before


@pytest.fixture(scope="module")
def actor(material: Path) -> roles.Actor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        model = roles.ModelSpec(str(material / "base"), "float32", 0, 2, False)
        training = roles.Training(AdamW((0.9, 0.95), 0.0, 1.0), 0, 2, 0.0, 60)
        return roles.Actor(model, training, Objective(0.2, 0.2, None, "token", "token", 8, None, 0.0, 0.0), 1.0)


def test_each_pass_counts(actor: roles.Actor) -> None:
    def loss(number: float) -> Loss:
        weight = next(actor.engine.module.parameters())
        return Loss(weight.sum() * number, {"loss": weight.sum()})

    assert counted(lambda: accumulate(actor.engine, [1.0, 2.0, 3.0], loss)) == 3
    documents = [Document([5, 6, 7 + i], [False, True, True]) for i in range(6)]
    assert counted(lambda: actor.logprobs(documents)) >= 3


def test_weights_count_while_they_are_sent_and_received(material: Path) -> None:
    policy = load_policy(str(material / "base"))
    assert counted(lambda: list(checkpoint_weights(policy.model, lambda parameters: nullcontext()))) >= 1
    rendezvous = Rendezvous(("127.0.0.1", free_port()), {}, b"", 30)
    sender = threading.Thread(target=lambda: Broadcast("gloo", 0, 2, rendezvous).send(iter([("w", torch.ones(5))])))
    sender.start()
    assert counted(lambda: list(Broadcast("gloo", 1, 2, rendezvous).receive())) == 1
    sender.join(30)


def test_steps_of_an_engine_that_sample_something_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_patches, "applies", lambda: True)

    class Processor:
        def process_outputs(self, outputs: list[Any]) -> list[Any]:
            return outputs

    class Output:
        request_id, new_token_ids, new_logprobs, routed_experts, finish_reason = "0", [1], None, None, None

    class Engine:
        output_processor = Processor()

    vllm_patches.wait_for_whole_answers(Engine)
    assert counted(lambda: Engine.output_processor.process_outputs([Output()])) == 1
    assert counted(lambda: Engine.output_processor.process_outputs([])) == 0


def test_steps_of_an_engine_of_another_release_count() -> None:
    """vLLM then hands on nothing before an answer is complete."""
    steps = iter([True, True, True, False])
    engine = SimpleNamespace(has_unfinished_requests=lambda: next(steps), step=list)
    sampler = Sampler.__new__(Sampler)
    sampler.llm, sampler._patched = SimpleNamespace(llm_engine=engine), False
    assert counted(lambda: list(sampler.stream([], [], Sampling(1, 1.0, 8, [])))) == 3


@pytest.mark.parametrize("what", ["state", "model"])
def test_bytes_of_a_state_or_model_count_while_they_are_written(
    what: str, actor: roles.Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def slowly(content: Any, place: Path, *others: Any) -> None:
        file = place / "model.safetensors" if place.is_dir() else place
        for size in (1000, 2000):
            file.write_bytes(b"x" * size)
            looks.append(progress.seen())

    monkeypatch.setattr(torch, "save", slowly)
    monkeypatch.setattr("rlhf_core.models.save.save_torch_state_dict", slowly)
    (actor.save_state if what == "state" else actor.export)(str(tmp_path))
    assert len(set(looks)) == 2
    (tmp_path / "later").write_text("not this work's")
    assert (before := progress.seen()) and (tmp_path / "more").write_text("either") and progress.seen() == before
