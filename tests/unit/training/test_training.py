"""SFT, reward model, DPO and KTO as stages: they train, resume bit for bit, and refuse to train on
nothing."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import rlhf_core.stages.dpo
import rlhf_core.stages.kto
import rlhf_core.stages.reward_model
import rlhf_core.stages.sft
from rlhf_core.config import DPO, KTO, SFT, Data, RewardModel, StageConfig
from rlhf_core.config.kinds import metrics_of
from rlhf_core.config.metrics.shared_metrics import BALANCE
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.weight_files import fill
from rlhf_core.models.reward_scoring import STATISTICS, RewardScorer, stored_statistics
from rlhf_core.runs import resume_state
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.training import train_loop
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.train_loop import deal, items_of_step, passes_of_rank, replicas
from tests.support.stage_request import stage_request
from tests.support.stage_work import WORK

COMMON = {"train_batch_size": 8, "micro_train_batch_size": 4, "max_len": 96, "learning_rate": 1e-3}


def config_of(kind: str, material: Path, samples: int = 40, **more: object) -> StageConfig:
    def data(name: str) -> Data:
        return Data(sources=str(material / name), max_samples=samples)

    fields = COMMON | more
    if kind == "sft":
        return SFT(model="base", data=data("sft.jsonl"), eval_data=data("sft_heldout.jsonl"), **fields)
    if kind == "reward_model":
        return RewardModel(
            model="base",
            data=data("preferences.jsonl"),
            eval_data=data("preferences_heldout.jsonl"),
            **fields,
        )
    if kind == "kto":
        fields = {"eval_data": data("preferences_heldout.jsonl"), "max_epochs": 1, **fields}
        return KTO(
            policy="base",
            data=data("preferences.jsonl").model_copy(update={"max_samples": samples // 2}),
            **fields,
        )
    return DPO(policy="base", data=data("preferences.jsonl"), **fields)


def run(config: StageConfig, material: Path, folder: Path) -> Outcome:
    folder.mkdir(exist_ok=True)
    request = stage_request(config, material / "base", seed=3)
    outcome = WORK[config.stage](request, RunDir(folder))
    assert set(outcome.metrics) == set(metrics_of(config)) - {
        BALANCE,
        f"eval/{BALANCE}",
    }, "what gates may name is what the stage writes"
    return outcome


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(kind, "float32", marks=() if kind == "dpo" else pytest.mark.long) for kind in WORK),
        ("sft", "bfloat16"),
    ],
)
def test_a_killed_stage_resumes_to_the_same_weights_and_curve(
    kind: str, dtype: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(kind, material, save_steps=2, dtype=dtype)
    whole = run(config, material, tmp_path / "whole")
    real_step = TorchEngine.step
    steps = []

    def dies_at_the_fourth_step(self: TorchEngine, rate: float) -> float:
        steps.append(rate)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real_step(self, rate)

    monkeypatch.setattr(TorchEngine, "step", dies_at_the_fourth_step)
    with pytest.raises(KeyboardInterrupt):
        run(config, material, tmp_path / "killed")
    again = run(config, material, tmp_path / "killed")
    assert len(steps) == 4 + 3, "steps 1-2 are in the saved state, 3-5 are done again or for the first time"

    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weight, weights(tmp_path / "killed")[name]), name
    assert again.metrics == whole.metrics
    curves = [
        [{k: v for k, v in line.items() if k != "time"} for line in read_metrics(tmp_path / run)]
        for run in ("whole", "killed")
    ]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize(
    ("larger", "smaller"),
    [
        ({"micro_train_tokens": 800}, {"micro_train_tokens": 200}),
        # a state of rows, continued by a stage that sets no size
        ({"micro_train_batch_size": 8}, {"micro_train_batch_size": None}),
    ],
)
def test_a_killed_stage_resumes_with_other_passes(
    kind: str,
    larger: dict[str, int],
    smaller: dict[str, int | None],
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after an out-of-memory error and a smaller micro-batch: the same curve up to rounding."""
    whole = run(config_of(kind, material, save_steps=2, **larger), material, tmp_path / "whole")
    real_step = TorchEngine.step
    steps = []

    def runs_out_of_memory(self: TorchEngine, rate: float) -> float:
        steps.append(rate)
        if len(steps) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real_step(self, rate)

    monkeypatch.setattr(TorchEngine, "step", runs_out_of_memory)
    with pytest.raises(
        RuntimeError,
        match=r"ran out of GPU memory: lower micro_train_tokens .*goes on from its last checkpoint",
    ):
        run(config_of(kind, material, save_steps=2, **larger), material, tmp_path / "killed")
    again = run(config_of(kind, material, save_steps=2, **smaller), material, tmp_path / "killed")
    assert len(steps) == 4 + 3, "steps 1-2 are in the saved state, 3-5 are done again or for the first time"
    curves = [
        [(line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert len(curves[0]) == 5 and curves[1] == [pytest.approx(point, rel=1e-4) for point in curves[0]]
    assert again.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("sft", "reward_model") else pytest.mark.long) for kind in WORK],
)
def test_loss_and_weights_do_not_depend_on_the_micro_batch(kind: str, material: Path, tmp_path: Path) -> None:
    outcomes: dict[object, Outcome] = {}
    for micro in (1, 4, 8):
        outcomes[micro] = run(
            config_of(kind, material, micro_train_batch_size=micro), material, tmp_path / str(micro)
        )
    outcomes["tokens"] = run(config_of(kind, material, micro_train_tokens=150), material, tmp_path / "tokens")
    default = {"micro_train_batch_size": None}
    outcomes["default"] = run(config_of(kind, material, **default), material, tmp_path / "default")
    for other in (1, 4, "tokens", "default"):
        for name in ("loss", "grad_norm", *(name for name in outcomes[8].metrics if name == "eval/loss")):
            assert outcomes[other].metrics[name] == pytest.approx(outcomes[8].metrics[name], rel=1e-4), (
                other,
                name,
            )


def test_weights_in_bf16_take_steps_smaller_than_the_distance_of_their_numbers() -> None:
    """Below 1 the distance is 2^-8: smaller steps would be lost."""
    module = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(module.weight)
    engine = TorchEngine(module, AdamW((0.9, 0.95), 0.0, 1.0))
    for _ in range(1000):
        engine.backward(module.weight.float().sum(), last=True)
        assert engine.step(1e-5) == pytest.approx(4.0)
    torch.testing.assert_close(module.weight.float(), torch.full((4, 4), 0.99), rtol=0, atol=2**-9)


def test_packing_does_not_change_the_loss_curve(material: Path, tmp_path: Path) -> None:
    curves = []
    for packing, rows in product((True, False), (4, None)):
        folder = tmp_path / f"{packing}-{rows}"
        run(config_of("sft", material, packing=packing, micro_train_batch_size=rows), material, folder)
        curves.append([(line["loss"], line["grad_norm"]) for line in read_metrics(folder)])
    for curve in curves[1:]:
        assert curves[0] == [pytest.approx(point, rel=1e-4) for point in curve]


def test_sft_lowers_the_held_out_loss(material: Path, tmp_path: Path) -> None:
    first = run(config_of("sft", material, samples=8), material, tmp_path / "short").metrics["eval/loss"]
    trained = run(config_of("sft", material, samples=200, max_epochs=2), material, tmp_path / "long")
    assert trained.metrics["eval/loss"] < 0.8 * first
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "long" / "checkpoint")
    assert model.config.tie_word_embeddings, "the base is tied, and its checkpoint must load back so"


def test_the_reward_model_stores_the_statistics_of_its_scores(material: Path, tmp_path: Path) -> None:
    outcome = run(config_of("reward_model", material), material, tmp_path)
    stored = json.loads((tmp_path / "checkpoint" / STATISTICS).read_text())
    assert stored == {"mean": outcome.metrics["score/mean"], "std": outcome.metrics["score/std"]}
    scorer = RewardScorer(str(tmp_path / "checkpoint"), "float32", 4)
    assert stored_statistics(str(tmp_path / "checkpoint")) == (stored["mean"], stored["std"])
    assert stored["std"] > 0
    documents = [Document([5, 6, 7, 8][:n], [True] * n) for n in (4, 2, 3)]
    alone = [scorer.score([d])[0] for d in documents]
    # scores keep the order, in passes of documents and of tokens, which the longest exceeds alone
    for tokens in (None, 3, 6, 1000):
        scorer.micro_tokens = tokens
        assert scorer.score(documents) == pytest.approx(alone, abs=1e-5)
    assert scorer.score([]) == []


def test_a_state_is_kept_by_the_clock_where_no_steps_are_named(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: dict[str, list[int]] = {}
    real = resume_state.close_state
    monkeypatch.setattr(
        resume_state,
        "close_state",
        lambda run, step, *rest: saved[run.path.name].append(step) or real(run, step, *rest),
    )
    for name, fields in {
        "often": {"save_minutes": 1e-9},
        "usual": {},
        "never": {"save_minutes": 0},
        "steps": {"save_minutes": 1e-9, "save_steps": 4},
    }.items():
        saved[name] = []
        run(config_of("sft", material, **fields), material, tmp_path / name)
    assert saved == {"often": [1, 2, 3, 4], "usual": [], "never": [], "steps": [4]}


def test_a_state_larger_than_the_free_disk_space_is_not_started(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    # the model has a million parameters
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    monkeypatch.setattr(resume_state, "close_state", lambda *_: pytest.fail("a state was kept"))
    run(config_of("sft", material, save_minutes=1e-9), material, tmp_path / "run")
    assert "no resume state is kept: it needs up to 0.0 GiB" in capsys.readouterr().out


def test_held_out_pairs_have_their_own_template(material: Path, tmp_path: Path) -> None:
    config = config_of("reward_model", material, train_batch_size=40)
    assert isinstance(config, RewardModel) and config.eval_data is not None
    other = config.model_copy(
        update={"eval_data": config.eval_data.model_copy(update={"template": "Question: {} Answer: "})}
    )
    found = [run(each, material, tmp_path / str(i)).metrics for i, each in enumerate((config, other))]
    assert found[0]["loss"] == found[1]["loss"] and found[0]["eval/loss"] != found[1]["eval/loss"]


def test_a_checkpoint_ends_its_answers_where_the_template_does(material: Path, tmp_path: Path) -> None:
    """A base model's end of sequence is another token than the end of turn that it is trained on."""
    base = tmp_path / "base"
    shutil.copytree(material / "base", base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    turns = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(base)
    config = config_of("sft", material, train_batch_size=40)
    request = stage_request(config, base, seed=3)
    (tmp_path / "run").mkdir()
    rlhf_core.stages.sft.run(request, RunDir(tmp_path / "run"))
    found = GenerationConfig.from_pretrained(tmp_path / "run" / "checkpoint").eos_token_id
    assert found == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_dpo_starts_at_the_reference(material: Path, tmp_path: Path) -> None:
    run(config_of("dpo", material), material, tmp_path)
    first, *_, last = read_metrics(tmp_path)
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < first["loss"]


def test_every_rank_gets_the_same_number_of_micro_batches() -> None:
    for count, world in ((5, 2), (4, 4), (1, 3), (7, 3)):
        shares = [deal(count, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(index for share in shares for index, weight in share if weight) == list(range(count))


def test_ranks_that_compute_passes_together_have_the_same_ones_and_count_them_once() -> None:
    for count, world, sharing in ((5, 4, 2), (3, 4, 4), (7, 6, 2)):
        ranks = [SimpleNamespace(rank=rank, world_size=world, sharing=sharing) for rank in range(world)]
        dealt = [passes_of_rank(count, rank) for rank in ranks]
        assert [replicas(rank) for rank in ranks] == [world // sharing] * world
        assert all(
            [own[:2] for own in mine] == deal(count, rank // sharing, world // sharing)
            for rank, mine in enumerate(dealt)
        )
        assert sorted(own.place for mine in dealt for own in mine if own.counted) == list(range(count))


def test_an_epoch_sees_every_item_once() -> None:
    items = list(range(10))
    epochs = [
        [i for step in range(e * 3, e * 3 + 3) for i in items_of_step(items, step, 3, 4, seed=1)]
        for e in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [items, items] and epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", WORK)
def test_a_stage_without_any_gradient_fails(
    kind: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchEngine, "step", lambda self, rate: 0.0)
    with pytest.raises(RuntimeError, match="nothing was trained"):
        run(config_of(kind, material, samples=8), material, tmp_path)


def test_steps_go_on_while_a_state_is_written(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = Event()
    rate = train_loop.learning_rate
    filled: list[int] = []

    def later(*args: Any) -> None:
        assert go.wait(60), "step 4 waits for the state of step 2"
        filled.append(1)
        fill(*args)

    def reached(step: int, *rest: Any) -> float:
        if step == 3:
            assert not filled
            go.set()
        return rate(step, *rest)

    monkeypatch.setattr("rlhf_core.training.state_files.fill", later)
    monkeypatch.setattr(train_loop, "learning_rate", reached)
    run(config_of("sft", material, save_steps=2), material, tmp_path)
    assert filled == [1, 1] and (tmp_path / "state" / "step-4").is_dir()
