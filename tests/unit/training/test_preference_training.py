"""The preference family as stages: two ranks train as one, a resume computes no reference, every loss learns
its objective."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rlhf_core.stages.dpo
import rlhf_core.stages.kto
import rlhf_core.stages.reference_logprobs
import rlhf_core.stages.reward_model
import rlhf_core.stages.sft
from rlhf_core.config import (
    DPO,
    KTO,
    SFT,
    Data,
    RewardModel,
    Source,
    StageConfig,
)
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import SUFFIX_FILE, Document, stored_suffix
from rlhf_core.data.packing import Passes
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.policy import Policy
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.stages.kto import all_mismatches, mismatch, mismatches_of
from rlhf_core.stages.reference_logprobs import answer_logprobs, reference_logprobs
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.train_loop import items_of_step
from tests.support.stage_request import stage_request

COMMON: dict[str, Any] = dict(train_batch_size=8, micro_train_batch_size=4, max_len=96, learning_rate=1e-3)
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "cdpo": {"loss": "sigmoid", "label_smoothing": 0.1, "nll_coef": 0.2},
    "ipo": {"loss": "ipo"},
    "ipo_sum": {"loss": "ipo_sum"},
    "simpo": {"loss": "simpo"},
    "orpo": {"loss": "orpo"},
}


def data(path: Path, samples: int, **more: Any) -> Data:
    return Data(sources=(Source(path=str(path), **more),), max_samples=samples)


def config_of(kind: str, material: Path, samples: int = 22, **more: Any) -> StageConfig:
    pairs = data(material / "preferences.jsonl", samples)
    held_out = data(material / "preferences_heldout.jsonl", 8)
    if kind == "kto":
        return KTO(
            policy="base", **{"data": pairs, "eval_data": held_out, **COMMON, "w_undesirable": 1.5, **more}
        )
    return DPO(policy="base", **{"data": pairs, "eval_data": held_out, **COMMON, **LOSSES[kind], **more})


def request_of(config: StageConfig, material: Path) -> StageRequest:
    inputs = {"base": str(material / "base"), "sft": str(material / "base")}
    return stage_request(config, inputs, seed=3)


def run(config: StageConfig, material: Path, folder: Path) -> Outcome:
    folder.mkdir(exist_ok=True)
    return module_of(config).run(request_of(config, material), RunDir(folder))


def module_of(config: StageConfig) -> ModuleType:
    return {
        "sft": rlhf_core.stages.sft,
        "reward_model": rlhf_core.stages.reward_model,
        "dpo": rlhf_core.stages.dpo,
        "kto": rlhf_core.stages.kto,
    }[config.stage]


@pytest.mark.parametrize("kind", ["sigmoid", pytest.param("kto", marks=pytest.mark.long)])
def test_a_resume_computes_no_reference(
    kind: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(kind, material, save_steps=1, reference="sft")
    loaded: list[str] = []
    load = module_of(config).open_frozen
    monkeypatch.setattr(
        module_of(config), "open_frozen", lambda source, *rest: loaded.append(source) or load(source, *rest)
    )
    whole = run(config, material, tmp_path / "whole")
    real = TorchEngine.step
    taken = 0

    def dies_at_the_third_step(self: TorchEngine, rate: float) -> float:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise KeyboardInterrupt
        return real(self, rate)

    with monkeypatch.context() as patched:
        patched.setattr(TorchEngine, "step", dies_at_the_third_step)
        with pytest.raises(KeyboardInterrupt):
            run(config, material, tmp_path / "killed")
    (kept,) = (tmp_path / "killed" / "state").glob("reference-*")
    assert len(loaded) == 2, "each run loaded the reference once"
    again = run(config, material, tmp_path / "killed")
    assert len(loaded) == 2, "the reference was loaded again"
    assert again.metrics == whole.metrics and kept.exists()


def test_reference_logprobs_are_cached_by_content(material: Path, tmp_path: Path) -> None:
    engine = TorchEngine(load_policy(str(material / "base")), AdamW((0.9, 0.95), 0.0, 1.0))
    document = Document([5, 6, 7, 8], [False, False, True, True])
    other = Document([5, 6, 7, 9], [False, False, True, True])
    opened: list[int] = []

    def logprobs_of(
        micro_batches: list[list[Document]], mean: bool = False, source: str = str(material / "base")
    ) -> list[float]:
        opened.append(0)
        return reference_logprobs(
            engine,
            RunDir(tmp_path),
            lambda: opened.append(1) or engine,
            source,
            micro_batches,
            Passes(2),
            0,
            mean,
        )  # type: ignore[func-returns-value]

    first = logprobs_of([[document, other]])
    assert sum(opened) == 1
    assert logprobs_of([[document, other]]) == first and sum(opened) == 1, "the result is read from the file"
    with torch.no_grad():
        assert first == pytest.approx(
            answer_logprobs(engine, [document, other], 0, False, engine.device).tolist()
        )
    longer = Document(document.tokens, [False, True, True, True])
    for number, (batches, mean) in enumerate(
        [([[document], [other]], False), ([[document, other]], True), ([[longer, other]], False)]
    ):
        # another batching, reduction or mask has another file
        assert logprobs_of(batches, mean) is not None and sum(opened) == 2 + number
    assert logprobs_of([[document, other]], mean=True) == pytest.approx([value / 2 for value in first])
    logprobs_of([[document, other]], source="org/model")
    assert sum(opened) == 5


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_a_loss_without_a_reference_computes_none(
    loss: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **more: object) -> list[float]:
        raise AssertionError("there is no reference")

    monkeypatch.setattr(rlhf_core.stages.dpo, "reference_logprobs", refuse)
    run(config_of(loss, material, samples=8), material, tmp_path)
    assert not list((tmp_path / "state").glob("reference-*"))


def first_loss(config: StageConfig, material: Path, folder: Path) -> float:
    run(config, material, folder)
    return read_metrics(folder)[0]["loss"]


def test_the_losses_have_their_known_values_at_the_reference(material: Path, tmp_path: Path) -> None:
    # All log-ratios are 0: DPO is log 2, IPO (1 / (2 beta))^2 whether log-probs are summed or averaged.
    found = {
        kind: first_loss(config_of(kind, material, samples=8), material, tmp_path / kind)
        for kind in ("sigmoid", "ipo", "ipo_sum")
    }
    assert found == pytest.approx({"sigmoid": 0.693147, "ipo": 25.0, "ipo_sum": 25.0}, abs=1e-4)
    # KTO: KL is 0 and every r too, so each answer costs half its weight; half of them are desirable.
    assert first_loss(config_of("kto", material, samples=4), material, tmp_path / "kto") == pytest.approx(
        (1 + 1.5) / 4, abs=1e-4
    )


def test_the_two_forms_of_ipo_differ_after_the_first_step(material: Path, tmp_path: Path) -> None:
    curves = [
        run(config_of(kind, material), material, tmp_path / kind).metrics["margin"]
        for kind in ("ipo", "ipo_sum")
    ]
    assert curves[0] != pytest.approx(curves[1], rel=0.05)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("sigmoid", "orpo", "kto") else pytest.mark.long)
        for kind in (*LOSSES, "kto")
    ],
)
def test_every_loss_learns_to_prefer_the_chosen_answers(kind: str, material: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text(
        "\n".join((material / "preferences.jsonl").read_text().splitlines()[-60:]) + "\n"
    )
    pairs = data(material / "preferences.jsonl", 160)
    held_out = data(tmp_path / "held_out.jsonl", 60)
    fields = {"data": pairs, "eval_data": held_out, "train_batch_size": 16, "micro_train_batch_size": 16}
    # a pair is two answers: as many steps
    more = {"max_epochs": 1, "w_undesirable": 1.0} if kind == "kto" else {"max_epochs": 2}
    run(config_of(kind, material, **fields, **more), material, tmp_path)
    curve = read_metrics(tmp_path)
    start = curve[0]
    end = curve[-1]  # the first step's numbers are those of the untrained model
    assert end["eval/accuracy"] >= 0.75, end
    assert end["eval/margin"] > start["margin"] and end["eval/loss"] < start["loss"], (start, end)


def test_mismatches_wrap_around_the_step() -> None:
    assert mismatches_of([4, 7, 9]) == [(4, 9), (7, 4), (9, 7)]
    assert mismatches_of([4]) == [], "one answer alone has no mismatched partner"
    made = mismatch(
        Document([1, 2, 3, 4], [False, False, True, True]),
        Document([5, 6, 7, 8, 9], [False, True, True, True, True]),
        5,
    )
    assert made == Document([1, 2, 6, 7, 8], [False, False, True, True, True])


def test_all_mismatches_are_those_of_the_steps() -> None:
    found = all_mismatches(count=10, held_out=3, batch=4, epochs=2, seed=1)
    assert len(set(found)) == len(found) and {(10, 12), (11, 10), (12, 11)} <= set(found)
    assert [found.index(pair) for pair in found] == list(range(len(found)))
    steps = [items_of_step(range(10), step, 3, 4, seed=1) for step in range(6)]
    assert list(found[:-3]) == list(dict.fromkeys(pair for step in steps for pair in mismatches_of(step)))
    assert set(found[:-3]) == {pair for step in steps for pair in mismatches_of(step)}


def test_ktos_kl_is_the_mean_over_the_whole_step(material: Path, tmp_path: Path) -> None:
    """Against a loop over the pairs, one by one, with two models in memory."""
    model = str(material / "base")
    other = tmp_path / "other"
    first = config_of("kto", material, samples=20, learning_rate=1e-2)  # away from the reference
    run(first, material, other)
    policy = load_policy(str(other / "checkpoint"))
    reference = load_policy(model)
    config = KTO(
        policy="moved",
        reference="base",
        data=data(material / "preferences.jsonl", 4),
        **{**COMMON, "micro_train_batch_size": 2},
    )
    request = request_of(config, material).model_copy(
        update={"inputs": {"moved": str(other / "checkpoint"), "base": model}}
    )
    (tmp_path / "run").mkdir()
    rlhf_core.stages.kto.run(request, RunDir(tmp_path / "run"))

    tokenizer = load_tokenizer(model)
    answers = rlhf_core.stages.kto.labelled_answers(config.data, Renderer(tokenizer, "chat"), 96, 3).items  # type: ignore[arg-type]
    step = items_of_step(answers, 0, 1, 8, seed=3)
    gaps = []
    with torch.no_grad():
        for i in range(8):
            document = mismatch(step[i].document, step[i - 1].document, 96)
            pi, ref = (
                float(answer_logprobs(m, [document], 0, False, torch.device("cpu")))
                for m in (policy, reference)
            )
            gaps.append(pi - ref)
    assert read_metrics(tmp_path / "run")[0]["kl"] == pytest.approx(
        max(0.0, sum(gaps) / 8), rel=1e-4, abs=1e-4
    )
    assert abs(sum(gaps) / 8) > 0.5, "the models must differ for this to show anything"


def test_the_margin_and_centering_count_in_the_loss_of_a_reward_model(material: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (material / "preferences.jsonl").read_text().splitlines()[:16]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "margin": 2.0}) + "\n" for row in rows))

    def curve(margin_key: str | None, centering: float = 0.0) -> list[float]:
        name = f"{margin_key}-{centering}"
        rows = data(tmp_path / "rows.jsonl", 16, margin_key=margin_key)
        run(RewardModel(model="base", data=rows, centering=centering, **COMMON), material, tmp_path / name)  # type: ignore[arg-type]
        return [line["loss"] for line in read_metrics(tmp_path / name)]

    with_margin = curve("margin")
    assert with_margin[0] == pytest.approx(2.126928, abs=1e-5), "log(1 + e^2)"
    assert curve(None)[0] == pytest.approx(0.693147, abs=1e-5)
    assert curve("margin", centering=1.0) != with_margin


@pytest.mark.slow
@pytest.mark.long
def test_the_reward_model_does_not_collapse_over_three_epochs(material: Path, tmp_path: Path) -> None:
    """Held-out accuracy and spread of the scores after three epochs are those of the first, or better."""
    rows = (material / "preferences.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:-150]) + "\n")
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows[-150:]) + "\n")
    found = {}
    for epochs in (1, 3):
        fields = {
            **COMMON,
            "train_batch_size": 32,
            "micro_train_batch_size": 32,
            "learning_rate": 5e-4,
            "centering": 0.01,
        }
        train = data(tmp_path / "train.jsonl", 10**6)
        held_out = data(tmp_path / "held_out.jsonl", 150)
        config = RewardModel(model="base", data=train, eval_data=held_out, max_epochs=epochs, **fields)
        found[epochs] = run(config, material, tmp_path / str(epochs)).metrics
    assert found[1]["eval/accuracy"] > 0.6, found
    assert found[3]["eval/accuracy"] >= found[1]["eval/accuracy"] - 0.03, found
    assert found[3]["score/std"] > 0.5 * found[1]["score/std"] > 0


def scored_rows(material: Path, folder: Path, count: int) -> Path:
    """Answers as a preferences stage writes them: the chosen ones score 3, the rejected ones 1."""
    rows = [json.loads(line) for line in (material / "preferences.jsonl").read_text().splitlines()[:count]]
    answers = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "response": row[column], "reward": reward}
        for row in rows
        for column, reward in (("chosen", 3.0), ("rejected", 1.0))
    ]
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in answers))
    return file


def mean_logprob(policy: Policy, renderer: Renderer, rows: list[dict[str, str]], column: str) -> float:
    documents = [renderer.answer([{"role": "user", "content": row["prompt"]}], row[column]) for row in rows]
    with torch.no_grad():
        parts = [
            answer_logprobs(policy, part, 0, True, torch.device("cpu"))
            for part in Passes(16).split(documents, len)
        ]
    return float(torch.cat(parts).mean())


def sft_on_answers(file: Path, material: Path, folder: Path, **more: Any) -> str:
    config = SFT(
        model="base",
        answers="made",
        max_len=128,
        train_batch_size=16,
        micro_train_batch_size=16,
        learning_rate=1e-3,
        **more,
    )
    request = request_of(config, material).model_copy(
        update={"inputs": {"base": str(material / "base"), "made": str(file)}}
    )
    folder.mkdir()
    rlhf_core.stages.sft.run(request, RunDir(folder))
    return str(folder / "checkpoint")


@pytest.mark.slow
@pytest.mark.long
def test_conditional_sft_follows_the_reward_in_the_prompt(material: Path, tmp_path: Path) -> None:
    checkpoint = sft_on_answers(
        scored_rows(material, tmp_path, 250), material, tmp_path / "run", condition="reward", max_epochs=4
    )
    # two rewards, as many of each: +1 and -1 after standardisation
    assert stored_suffix(checkpoint) == " <rm_score>: 1.00"
    policy = load_policy(checkpoint).eval()
    tokenizer = load_tokenizer(checkpoint)
    rows = [json.loads(line) for line in (material / "preferences.jsonl").read_text().splitlines()[-60:]]
    scores: dict[str, Callable[[str], float]] = {
        suffix: lambda column, suffix=suffix: mean_logprob(
            policy, Renderer(tokenizer, "chat", suffix), rows, column
        )  # type: ignore[misc]
        for suffix in (" <rm_score>: 1.00", " <rm_score>: -1.00")
    }
    best, worst = scores.values()
    assert best("chosen") > worst("chosen") and worst("rejected") > best("rejected")
    assert best("chosen") - best("rejected") > worst("chosen") - worst("rejected") + 0.2


def test_sft_on_the_best_answers_raises_their_probability(material: Path, tmp_path: Path) -> None:
    file = scored_rows(material, tmp_path, 100)
    best = [line for line in file.read_text().splitlines() if json.loads(line)["reward"] == 3.0]
    file.write_text("\n".join(best) + "\n")
    checkpoint = sft_on_answers(file, material, tmp_path / "run")
    assert not (Path(checkpoint) / SUFFIX_FILE).exists()
    rows = [json.loads(line) for line in (material / "preferences.jsonl").read_text().splitlines()[-60:]]
    gained = {}
    for column in ("chosen", "rejected"):
        before, after = (
            mean_logprob(load_policy(place).eval(), Renderer(load_tokenizer(place), "chat"), rows, column)
            for place in (str(material / "base"), checkpoint)
        )
        gained[column] = after - before
    assert gained["chosen"] > 0.5 and gained["chosen"] > gained["rejected"]
