"""Where progress is counted: each pass, weight and step of an engine, and bytes of states and models while
they are read or written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlhf_core.cluster.rank_environment import store_address
from rlhf_core.config import PPO, SFT, Data
from rlhf_core.data import sources
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.packing import Passes
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.checkpoint.weight_files import fill
from rlhf_core.models.load_model import load_policy, load_scorer
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.objectives.losses import Loss
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from rlhf_core.rollout.weight_transfer import Broadcast, Rendezvous
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.reference_logprobs import dealt_logprobs
from rlhf_core.system import progress
from rlhf_core.system.files import sync_to_disk
from rlhf_core.training.train_loop import Saving, Task, accumulate, fit
from tests.support.tiny_models import reward_model


def counted(work: Callable[[], Any]) -> int:
    before = progress._steps
    work()
    return progress._steps - before


@pytest.fixture(scope="module")
def actor(material: Path) -> Actor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        model = ModelSpec(str(material / "base"), "float32", 0, 2, False)
        return Actor(model, PPO(prompts=Data(sources="none"), zero_stage=0), 0)


def test_each_pass_counts(actor: Actor) -> None:
    def loss(number: float) -> Loss:
        weight = next(actor.engine.module.parameters())
        return Loss(weight.sum() * number, {"loss": weight.sum()})

    assert counted(lambda: accumulate(actor.engine, [1.0, 2.0, 3.0], loss)) == 3
    documents = [Document([5, 6, 7 + i], [False, True, True]) for i in range(6)]
    assert counted(lambda: actor.logprobs(documents)) >= 3


def test_rows_that_are_read_count(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PROGRESS_SECONDS", -1.0)
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    data = Data(sources=str(material / "sft.jsonl"), max_samples=5)
    assert counted(lambda: sources.sft_documents(data, renderer, 64, 0)) == 5


def test_files_that_are_synced_count(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    assert counted(lambda: sync_to_disk(tmp_path)) == 2, "the folder and its file"


def test_passes_of_a_reference_count(actor: Actor) -> None:
    documents = [Document([5, 6, 7 + i], [False, True, True]) for i in range(4)]
    assert (
        counted(
            lambda: dealt_logprobs(
                actor.engine, actor.engine, [documents[:2], documents[2:]], Passes(2), 0, False
            )
        )
        == 2
    )


@pytest.mark.parametrize("load", [load_policy, lambda path: load_scorer(path, 0, on_host=True)])
def test_weights_count_while_a_model_loads(
    load: Callable[[str], Policy | Scorer], material: Path, tmp_path: Path
) -> None:
    path = reward_model(material / "base", tmp_path / "reward_model")
    loaded: list[Policy | Scorer] = []
    count = counted(lambda: loaded.append(load(str(path))))
    assert count >= 2 * len(list(loaded[0].parameters())), "each when its module is made, and when it is read"


def test_weights_count_while_they_are_sent_and_received(material: Path) -> None:
    policy = load_policy(str(material / "base"))
    assert counted(lambda: list(checkpoint_weights(policy.model, lambda parameters: nullcontext()))) >= 1
    rendezvous = Rendezvous(store_address(), {}, b"", 30)
    sender = threading.Thread(
        target=lambda: Broadcast("gloo", 0, 2, rendezvous).send(iter([("w", torch.ones(5))]))
    )
    sender.start()
    assert counted(lambda: list(Broadcast("gloo", 1, 2, rendezvous).receive())) == 1
    sender.join(30)


def test_work_of_child_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.CHILDREN, os.devnull)  # to be as it was at the end
    work = [sys.executable, "-c", "from rlhf_core.system import progress; progress.made()"]
    subprocess.run(work, check=True)
    before = progress.seen()
    progress.count_children()
    assert progress.seen() == before
    for _ in range(2):
        subprocess.run(work, check=True)
        assert before != (before := progress.seen())


def test_steps_of_an_engine_count() -> None:
    """vLLM hands on nothing before an answer is complete."""
    engine = SimpleNamespace(step=list)
    sampler = VllmEngine.__new__(VllmEngine)
    sampler.llm = SimpleNamespace(llm_engine=engine)
    assert counted(lambda: [sampler._step() for _ in range(3)]) == 3


def test_weights_of_a_state_or_model_count_while_they_are_written_or_read(
    actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def watched(files: Any, weights: Any, expected: Any) -> None:
        fill(files, ((looks.append(progress.seen()), pair)[1] for pair in weights), expected)

    for module in ("models.checkpoint.save", "training.state_files"):
        monkeypatch.setattr(f"rlhf_core.{module}.fill", watched)
    trained = len(list(actor.module.parameters()))
    for write in (
        lambda: actor.export(str(tmp_path / "model")),
        lambda: (actor.save_state(str(tmp_path)), actor.finish_saving()),
        # of a training stage
        lambda: ((saving := Saving(actor.engine, RunDir(tmp_path / "sft"), 1)).begin(1, {}), saving.finish()),
    ):
        looks.clear()
        write()
        assert len(looks) == len(set(looks)) >= trained
    assert counted(lambda: actor.load_state(str(tmp_path))) >= trained
    with pytest.raises(KeyError, match="recent"):  # what `fit` needs besides, after it has read the state
        fit(
            actor.engine,
            RunDir(tmp_path / "sft"),
            Task([1], Mock(), Mock(), Mock(), None, ()),
            SFT(data=Data(sources="none")),
            0,
        )
    (tmp_path / "later").write_text("not this work's")
    assert (
        (before := progress.seen()) and (tmp_path / "more").write_text("either") and progress.seen() == before
    )


def test_work_between_two_looks_is_told_in_numbers() -> None:
    assert (
        progress.between([("", "3/0/0"), ("5/1048576/0", "7/4194304/2097152")])
        == "5 parts of work, 3 MiB written"
    )
    assert progress.between([("4/9/0", "4/0/0")]) == "0 parts of work", "a file that was renamed"
