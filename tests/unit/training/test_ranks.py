"""Ranks of a training stage, and what preference losses need of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config import (
    REFERENCE_FREE,
    Ranks,
    StageConfig,
    Trainable,
)
from rlhf_core.models.kernels.feed_forward import split_feed_forward
from rlhf_core.models.policy import Policy
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.training import ranks
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.zero.zero_engine import split_blocks
from tests.unit.training.test_preference_training import LOSSES, config_of, module_of, request_of, run


class Toy(Trainable):
    """A kind of stage that is in no table."""

    stage: Literal["toy"] = "toy"


def test_a_training_stage_of_any_kind_runs_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "set_rank_environment", lambda *_: None)
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: False)
    request = StageRequest.model_construct(name="toy", digest="d", config=Toy(), inputs={}, seed=0)
    outcome = ranks.on_ranks(lambda request, run: Outcome({"rows": 1.0}, {}), request, RunDir(tmp_path))
    assert outcome.metrics == {"rows": 1.0}


@pytest.mark.parametrize(
    ("zero", "nodes", "cut"),
    [
        ({}, 1, True),
        ({"reduce_bucket_size": 1000, "zero_quantized_weights": False}, 1, True),
        ({"zero_quantized_weights": True}, 1, False),
        ({"zero_quantized_nontrainable_weights": True}, 1, False),
        ({}, 2, False),
    ],
)
def test_weights_of_which_deepspeed_makes_others_are_whole_when_it_gets_them(
    zero: dict[str, object], nodes: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It quantises (qwZ), and makes second copies (hpZ), where it cuts a weight itself."""
    monkeypatch.setattr("rlhf_core.training.zero.zero_backend.ZeroShards", lambda dtype, on_host: "shards")
    config = Toy(
        ranks=Ranks(num_nodes=nodes, num_ranks_per_node=2),
        zero_stage=3,
        zero_hpz=nodes > 1,
        deepspeed={"zero_optimization": zero},
    )
    assert (ranks.shards_of(config) is not None) is cut


def test_feed_forward_blocks_that_share_weights_are_not_computed_in_parts_under_zero_3() -> None:
    shape = dict(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2
    )
    model = LlamaForCausalLM(LlamaConfig(**shape))
    split_feed_forward(model, 4)
    blocks = [layer.mlp for layer in model.model.layers]
    assert split_blocks(model) == blocks
    model.model.layers[1].mlp = blocks[0]
    with pytest.raises(
        ValueError,
        match="feed-forward blocks that share weights cannot be computed in parts with zero_stage=3",
    ):
        split_blocks(model)


TWO = {"zero_stage": 1, "ranks": Ranks(num_ranks_per_node=2, cpus=0.5)}


class AllReduce:
    """Sums tensors of threads in the order of their ranks."""

    def __init__(self, ranks: int):
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.values: dict[int, torch.Tensor] = {}

    def sum(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        self.values[rank] = value
        self.barrier.wait()
        total = sum((self.values[other] for other in sorted(self.values)), torch.zeros_like(value))
        self.barrier.wait()
        return total


class RankEngine(TorchEngine):
    """One of two data-parallel ranks: gradients are summed before each step."""

    def __init__(self, module: Policy, config: Trainable, rank: int, group: AllReduce):
        super().__init__(module, AdamW(config.betas, config.weight_decay, config.max_norm))
        self.rank = rank
        self.world_size = 2
        self.group = group

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return self.group.sum(self.rank, values.clone())

    def step(self, learning_rate: float) -> float:
        for parameter in self.module.parameters():
            parameter.grad = self.group.sum(
                self.rank, parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            )
        return super().step(learning_rate)

    def barrier(self) -> None:
        self.group.barrier.wait()


def run_on_two(config: StageConfig, material: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the stage on two ranks, each in a thread."""
    folder.mkdir(exist_ok=True)
    module = module_of(config)
    group = AllReduce(2)
    here = threading.local()
    # transformers keeps global state while it loads a model or renders a chat template
    lock = threading.Lock()

    def guarded(work: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*arguments: Any, **named: Any) -> Any:
            with lock:
                return work(*arguments, **named)

        return alone

    guards = {"open_frozen", "policy_to_train", "load_tokenizer", "Renderer"}
    for name in (guards | {"preference_pairs", "labelled_answers"}) & set(vars(module)):
        monkeypatch.setattr(module, name, guarded(getattr(module, name)))
    monkeypatch.setattr(
        module, "make_engine", lambda policy, config, **_: RankEngine(policy, config, here.rank, group)
    )
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        here.rank = rank
        try:
            module.train(request_of(config, material), RunDir(folder))
        except BaseException as error:
            failed.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "sigmoid" else pytest.mark.long) for kind in (*LOSSES, "kto")],
)
def test_two_ranks_and_other_micro_batches_train_as_one_rank_does(
    kind: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config_of(kind, material, micro_train_batch_size=8), material, tmp_path / "whole")
    run(config_of(kind, material, micro_train_batch_size=1), material, tmp_path / "single")
    run(config_of(kind, material, micro_train_tokens=150), material, tmp_path / "tokens")
    run(config_of(kind, material, micro_train_batch_size=None), material, tmp_path / "default")
    # 22 pairs in steps of 8: the last has 3 micro-batches of 2.
    run_on_two(
        config_of(kind, material, micro_train_batch_size=2, **TWO), material, tmp_path / "two", monkeypatch
    )
    curves = [read_metrics(tmp_path / name) for name in ("whole", "single", "two", "tokens", "default")]
    assert len(curves[0]) == (6 if kind == "kto" else 3)
    names = set(curves[0][-1]) - {"time", "step"}
    assert {"loss", "grad_norm", "accuracy", "margin", "eval/loss"} <= names
    for curve in curves[1:]:
        for line, expected in zip(curve, curves[0], strict=True):
            # At the first step the policy is the reference, if there is one: the sign of its margin is
            # rounding.
            equal = line["step"] == 1 and kind not in REFERENCE_FREE
            assert not equal or abs(line["margin"]) < 1e-5
            compared = names - {"accuracy"} if equal else names
            assert {name: line[name] for name in compared & set(line)} == pytest.approx(
                {name: expected[name] for name in compared & set(expected)}, rel=1e-3, abs=1e-5
            )
    for name, weight in load_file(tmp_path / "whole" / "checkpoint" / "model.safetensors").items():
        other = load_file(tmp_path / "two" / "checkpoint" / "model.safetensors")[name]
        # AdamW's first steps move by the sign of tiny gradients, so a few elements differ by fractions of the
        # learning rate.
        assert (weight - other).abs().mean() < 2e-5, name
