"""Which ZeRO stage is taken where a recipe leaves it open, and that an explicit one, a resume state and the
digests are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.config import DPO, PPO, SFT, Data, Lora, Ranks, RewardModel, Trainable
from rlhf_core.forecast.fitting_passes import Pass, as_laid
from rlhf_core.forecast.hardware import GIB, Gpu
from rlhf_core.forecast.memory import USABLE
from rlhf_core.forecast.placements import forecast, placements
from rlhf_core.forecast.zero_stage import (
    Chosen,
    peak_of_ppo,
    peak_of_training,
    stage_of_ppo,
    stage_of_state,
    stage_of_training,
    uses_deepspeed,
)
from rlhf_core.hub.model_config import Size, size_of_config
from rlhf_core.runs import resume_state
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.start_fleet import zero_stage_of
from rlhf_core.training.ranks import on_ranks, with_zero_stage
from tests.support.stage_request import stage_request

SHAPE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
BIG = size_of_config({**SHAPE, "vocab_size": 152064})  # 7.6 billion parameters
DATA = Data(sources="d.jsonl")
FOUR = Ranks(num_ranks_per_node=4, gpus=1)


def sft(**fields: Any) -> SFT:
    return SFT(
        data=DATA,
        **{
            "ranks": FOUR,
            "dtype": "bfloat16",
            "micro_train_tokens": 4096,
            "gradient_checkpointing": 1,
            **fields,
        },
    )


def ppo(**fields: Any) -> PPO:
    shared = {
        **dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), FOUR),
        "engine": {"gpus": 1},
    }
    tokens = {"micro_train_tokens": 4096, "micro_rollout_tokens": 4096, "gradient_checkpointing": 1}
    return PPO.model_validate(
        {"prompts": DATA, "reward": "rm", "dtype": "bfloat16", **shared, **tokens, **fields}
    )


def sizes(config: PPO) -> dict[str, Size]:
    return dict.fromkeys(config.groups, BIG)


def test_the_lowest_stage_that_fits_is_taken() -> None:
    taken = {memory: stage_of_training(sft(), BIG, memory * GIB).stage for memory in (100, 68, 62)}
    assert taken == {100: 1, 68: 2, 62: 3}
    for memory, stage in taken.items():
        assert peak_of_training(sft(), BIG, stage, memory * GIB) <= USABLE * memory * GIB
        assert stage == 1 or peak_of_training(sft(), BIG, stage - 1, memory * GIB) > USABLE * memory * GIB
    chosen = stage_of_training(sft(), BIG, 20 * GIB)
    assert chosen.stage == 3
    assert "none is estimated to fit a GPU of 20.0 GiB (" in chosen.why
    assert "GiB with 3)" in chosen.why
    told = str(stage_of_training(sft(), BIG, 100 * GIB))
    assert told.startswith("zero_stage 1: the lowest that fits a GPU of 100.0 GiB (")


def test_a_reference_model_counts_where_there_is_one() -> None:
    small = size_of_config({**SHAPE, "vocab_size": 152064, "num_hidden_layers": 2})
    how: dict[str, Any] = {"data": DATA, "ranks": FOUR, "dtype": "bfloat16", "micro_train_tokens": 65536}
    assert peak_of_training(DPO(**how), small, 3, 80 * GIB) >= peak_of_training(
        RewardModel(**how), small, 3, 80 * GIB
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_explicit_stage_is_obeyed(stage: Any) -> None:
    assert stage_of_training(sft(zero_stage=stage), BIG, 10 * GIB) == Chosen(stage, "as the recipe says")
    assert stage_of_ppo(ppo(zero_stage=stage), sizes(ppo()), 10 * GIB).stage == stage


LARGE = size_of_config(
    {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
     "vocab_size": 128256}
)  # fmt: skip


def test_one_rank_trains_without_zero() -> None:
    assert stage_of_training(sft(ranks=Ranks(gpus=1)), BIG, 10 * GIB).stage == 0
    assert sft(ranks=Ranks()).zero_stage == "auto"


@pytest.mark.parametrize(
    ("size", "memory", "dtype", "why"),
    [
        (BIG, 0, "bfloat16", "as there is no GPU"),
        (None, 80 * GIB, "bfloat16", "has no sizes"),
        (BIG, 80 * GIB, "float32", "as it is not bfloat16"),
    ],
)
def test_what_cannot_be_estimated_takes_the_least_memory(
    size: Size | None, memory: float, dtype: str, why: str
) -> None:
    config = ppo(dtype=dtype)
    for chosen in (
        stage_of_training(sft(dtype=dtype), size, memory),
        stage_of_ppo(config, sizes(config) if size else None, memory),
    ):
        assert chosen.stage == 3 and why in chosen.why


def test_adapters_need_little_and_4_bit_weights_are_never_cut() -> None:
    assert (
        stage_of_training(sft(lora=Lora()), BIG, 48 * GIB).stage
        == 1
        < stage_of_training(sft(), BIG, 48 * GIB).stage
    )
    quantized = Lora(quantize="nf4")
    assert (
        stage_of_training(sft(lora=quantized), BIG, 4 * GIB).stage
        == stage_of_training(sft(lora=quantized), BIG, 0).stage
        == 2
    )
    assert stage_of_ppo(ppo(lora=quantized), sizes(ppo()), 0).stage == 2


def test_ppo_counts_all_that_shares_the_gpus_of_actor_and_critic() -> None:
    memory = 100 * GIB
    assert stage_of_ppo(ppo(), sizes(ppo()), memory).stage == 1
    beside = ppo(colocate_actor_ref=True, colocate_critic_reward=True)
    together = ppo(colocate_all=True, engine={"num_engines": 4, "gpus": 1, "gpu_memory_utilization": 0.3})
    stages = [stage_of_ppo(config, sizes(config), memory).stage for config in (ppo(), beside, together)]
    assert stages == sorted(stages) and stages[0] < stages[-1] == 3
    assert stage_of_ppo(ppo(adam_offload=True), sizes(ppo()), memory).stage == 2
    placed = forecast("as in the recipe", beside, {}, sizes(beside), Gpu(memory=memory))
    explicit = ppo(colocate_actor_ref=True, colocate_critic_reward=True, zero_stage=stages[1])
    # `alignflow plan` takes the same
    assert placed == forecast("as in the recipe", explicit, {}, sizes(beside), Gpu(memory=memory))
    assert (
        placements(beside, 4, sizes(beside), Gpu(memory=memory))[0].name
        == f"as in the recipe, zero_stage {stages[1]}"
    )
    assert placements(explicit, 4, sizes(beside), Gpu(memory=memory))[0].name == "as in the recipe"


def test_actor_and_critic_with_a_gpu_each_need_no_deepspeed() -> None:
    one = dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), Ranks(gpus=0.2))
    for config in (ppo(**one), ppo(**one, dtype="float32"), ppo(**one, lora=Lora(quantize="nf4"))):
        assert stage_of_ppo(config, None, 100 * GIB) == Chosen(0, "one rank has nothing to share out")
        assert not uses_deepspeed(config)
    for more in (
        {"critic_ranks": FOUR},
        {"adam_offload": ["critic"]},
        {"zero_stage": 1},
        {"actor_ranks": Ranks(), "reference_ranks": Ranks()},
    ):
        assert uses_deepspeed(ppo(**one | more)), more
    assert stage_of_ppo(ppo(**one, adam_offload=True), None, 100 * GIB).stage == 3
    explicit = ppo(**one, zero_stage=0)
    assert stage_of_ppo(explicit, None, 0).stage == 0 and not uses_deepspeed(explicit)
    assert uses_deepspeed(ppo(**dict.fromkeys(one, Ranks()), engine={})), "without GPUs"
    with pytest.raises(
        ValidationError, match="zero_stage=0 trains on one rank, but critic_ranks configures 4"
    ):
        ppo(**one | {"critic_ranks": FOUR}, zero_stage=0)
    with pytest.raises(ValidationError, match="zero_stage=0 keeps Adam on the GPU"):
        ppo(**one, zero_stage=0, adam_offload=True)


def test_ppo_reads_its_gpus_and_keeps_the_stage_of_a_resume_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 152064}))

    class Group:
        def __init__(self, memory: float, host: float = 4096):
            self.memory = memory
            self.host = host

        def gpu_bytes(self, timeout: float) -> float:
            return self.memory * GIB

        nodes = ("here",) * 4

        def free_hosts(self, timeout: float) -> dict[str, float]:
            return {"here": self.host * GIB}

    config = ppo()
    groups: Any = {"actor": Group(100), "critic": Group(48)}
    paths = dict.fromkeys(config.groups, str(tmp_path))
    assert zero_stage_of(config, paths, groups, None).stage == 3, "the smaller GPU decides"
    groups["critic"] = Group(100)
    assert zero_stage_of(config, paths, groups, None).stage == 1
    assert zero_stage_of(config, paths, groups, 3) == Chosen(3, "as its resume state")
    assert zero_stage_of(config, paths, groups, 0) == Chosen(0, "as its resume state")
    assert str(stage_of_state(ppo(adam_offload=True, param_offload=True), 1)).endswith(
        "as its resume state, so param_offload counts from the next start without one"
    )
    assert (
        stage_of_state(ppo(adam_offload=True, param_offload=True), 0).why.count(
            "adam_offload and param_offload count from"
        )
        == 1
    )
    assert zero_stage_of(ppo(zero_stage=2), paths, groups, 3).stage == 2
    capsys.readouterr()
    assert zero_stage_of(config, paths, groups, None).stage == 1
    printed = capsys.readouterr().out
    assert printed.startswith("actor and critic: zero_stage 1: the lowest") and "out of memory" not in printed
    groups["actor"] = Group(40)
    zero_stage_of(config, paths, groups, None)
    estimate = peak_of_ppo(config, sizes(config), 3, 40 * GIB) / GIB
    assert (
        f"it may run out of memory: an estimated {estimate:.1f} GiB on a GPU of 40.0; `alignflow plan RECIPE"
        " --gpu-memory 40.0`" in capsys.readouterr().out
    )
    assert "host memory" not in printed
    groups["critic"] = Group(100, 100)
    zero_stage_of(ppo(adam_offload=True), paths, groups, None)
    assert re.search(
        r"run out of host memory: an estimated \d{3}\.\d GiB on a node with 100\.0 free",
        capsys.readouterr().out,
    )
    on_cpu = ppo(
        **dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), Ranks()),
        engine={},
    )
    assert zero_stage_of(on_cpu, paths, {}, None).stage == 3


def test_a_group_gets_a_request_with_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 152064}))
    run = RunDir(tmp_path / "run")
    run.path.mkdir()

    def resolved(config: Trainable, memory: int, host: int = 4096) -> Any:
        request = stage_request(config, tmp_path)
        return with_zero_stage(request, run, config, memory * GIB, host * GIB).config.zero_stage  # type: ignore[union-attr]

    assert (resolved(sft(), 100), resolved(sft(), 48), resolved(sft(zero_stage=2), 100)) == (1, 3, 2)
    capsys.readouterr()
    assert resolved(sft(), 60) == 3 and "out of memory" not in capsys.readouterr().out
    assert resolved(sft(zero_stage=2), 48) == 2
    estimate = peak_of_training(sft(), BIG, 2, 48 * GIB) / GIB
    assert (
        f"it may run out of memory: an estimated {estimate:.1f} GiB on a GPU of 48.0"
        in capsys.readouterr().out
    )
    assert resolved(sft(zero_stage=2, adam_offload=True), 100) == 2
    assert "host memory" not in capsys.readouterr().out
    assert resolved(sft(zero_stage=2, adam_offload=True), 100, 120) == 2
    assert "it may run out of host memory: an estimated " in capsys.readouterr().out
    resume_state.save(run, 3, 1, {"layout": {"ranks": 4, "zero_stage": 2}}, lambda folder: None).wait()
    assert resolved(sft(), 100) == 2, "other GPUs do not change what a state was made with"


def test_a_stage_whose_gpu_is_full_says_what_helps(tmp_path: Path) -> None:
    def rank(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    request = stage_request(sft(ranks=Ranks()), tmp_path, name="tuned")
    with pytest.raises(
        RuntimeError,
        match=r"^tuned ran out of GPU memory: lower micro_train_tokens .*`alignflow plan`.* allocate 2 GiB$",
    ):
        on_ranks(rank, request, RunDir(tmp_path / "run"))


def test_a_pair_is_two_documents_and_4_bit_weights_are_a_quarter() -> None:
    fields: dict[str, Any] = dict(
        data=DATA, ranks=FOUR, dtype="bfloat16", micro_train_batch_size=4, max_len=2048
    )
    pairs = RewardModel(**fields)
    same = RewardModel(**fields, micro_train_tokens=2 * 4 * 2048)
    assert peak_of_training(pairs, BIG, 3, 80 * GIB) == peak_of_training(same, BIG, 3, 80 * GIB)
    texts = SFT(**fields)
    assert peak_of_training(texts, BIG, 3, 80 * GIB) < peak_of_training(pairs, BIG, 3, 80 * GIB)
    whole, quarter = (
        peak_of_training(sft(lora=Lora(quantize=kind)), BIG, 2, 80 * GIB) for kind in ("none", "nf4")
    )
    assert whole - quarter == pytest.approx(1.48 * BIG.parameters)


def test_ranks_that_compute_passes_together_have_each_a_part_of_the_activations() -> None:
    alone = sft(micro_train_tokens=8 * 4096, max_len=4096)
    together = alone.model_copy(update={"sequence_parallel_size": 4})
    short = sft(micro_train_tokens=2 * 4096, max_len=2 * 4096)
    assert peak_of_training(together, BIG, 3, 80 * GIB) == peak_of_training(short, BIG, 3, 80 * GIB)
    assert peak_of_training(together, BIG, 3, 80 * GIB) < peak_of_training(alone, BIG, 3, 80 * GIB)
    # A step of 128 documents: as many tokens on a rank, in passes that are four times as many and a quarter
    # as long.
    assert as_laid(alone, 4) == (Pass(8 * 4096, 1.0), 4) and as_laid(together, 4) == (Pass(2 * 4096, 1.0), 16)
    config = ppo(sequence_parallel_size=2, reference_ranks=Ranks(gpus=1))
    assert [config.sharing_of(role) for role in ("actor", "critic", "reference")] == [2, 2, 1]


def test_what_plain_torch_lacks_is_trained_by_deepspeed_on_one_rank_too() -> None:
    alone = sft(ranks=Ranks(gpus=1))
    assert stage_of_training(alone, LARGE, 80 * GIB).stage == 0
    assert stage_of_training(alone.model_copy(update={"adam_offload": True}), LARGE, 80 * GIB).stage in (2, 3)
    on_host = stage_of_training(alone.model_copy(update={"param_offload": True}), LARGE, 80 * GIB)
    assert on_host == (3, "param_offload is for weights that are sharded")
    nodes = sft(ranks=Ranks(num_nodes=2, num_ranks_per_node=2, gpus=1), zero_hpz=True)
    assert stage_of_training(nodes, BIG, 1000 * GIB) == (3, "zero_hpz is for weights that are sharded")
    assert stage_of_training(nodes.model_copy(update={"zero_hpz": False}), BIG, 1000 * GIB).stage == 1
    two = dict.fromkeys(("actor_ranks", "critic_ranks"), nodes.ranks)
    assert stage_of_ppo(ppo(**two, zero_hpz=True), sizes(ppo()), 1000 * GIB).stage == 3
    block = alone.model_copy(update={"deepspeed": {"wall_clock_breakdown": True}})
    assert not block.alone and stage_of_training(block, None, 0).stage == 3
    layouts = [resume_state.layout_of(config) for config in (block, alone)]
    assert [layout["zero_stage"] for layout in layouts] == ["auto", 0]
