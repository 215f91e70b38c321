"""What a stage would make of its rows, told before any work: rows that its token limit leaves out or cuts,
and batches that they do not fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.app import main
from rlhf_core.config import PPO, Data, Preferences
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.sources import sft_documents
from rlhf_core.preflight.rows import sample, template_rows
from rlhf_core.preflight.rows.batches import batch_warning
from rlhf_core.preflight.rows.template_rows import Rendered, render_rows
from tests.support.tiny_models import save_weights
from tests.unit.preflight.test_check import TEMPLATE, save_tokenizer

LONG = "many words before the answer begins " * 4
SHORT = "hi"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """One token a byte."""
    base = tmp_path_factory.mktemp("limits") / "base"
    save_tokenizer(base, TEMPLATE)
    (base / "config.json").write_text('{"model_type": "llama"}')
    save_weights(base / "model.safetensors", {"lm_head.weight": (300, 8)})
    return Renderer(load_tokenizer(str(base)), "chat")


def data_of(file: Path, *rows: dict[str, Any], **more: Any) -> Data:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(sources=str(file), **more)


def of(kind: str, prompt: str, count: int = 1) -> list[dict[str, Any]]:
    """Rows of a kind whose answers are short."""
    columns = {
        "sft": {"response": "ho"},
        "preference": {"chosen": "ho", "rejected": "no"},
        "labelled": {"response": "ho", "label": True},
        "scored": {"response": "ho", "reward": 1.0},
        "prompt": {},
    }
    return [{"prompt": prompt, **columns[kind]}] * count


def test_rows_that_are_all_left_out_are_refused_as_the_stage_does(tmp_path: Path, renderer: Renderer) -> None:
    data = data_of(tmp_path / "rows.jsonl", *of("sft", LONG, 20))
    told = render_rows(renderer, data, "sft", "max_len", 100).refused
    why = (
        "all 20 rows would be left out (no answer within the token limit: 20): raise max_len, which is 100,"
        " or correct the data"
    )
    assert told == f"{tmp_path}/rows.jsonl: {why}"
    with pytest.raises(ValueError, match="all 20 rows were dropped"):
        sft_documents(data, renderer, 100, 0)
    assert render_rows(renderer, data, "sft", "max_len", 400) == Rendered("", (), 20)
    # a data set without a limit of whole rows
    assert render_rows(renderer, data, "sft") == Rendered("", (), 20)
    same = data_of(tmp_path / "same.jsonl", {"prompt": "x", "chosen": "y", "rejected": "y"})
    told = render_rows(renderer, same, "preference", "max_len", 400).refused
    assert told.endswith(
        "all 1 pairs would be left out (chosen and rejected are the same: 1): correct the data"
    )


@pytest.mark.parametrize(("kind", "noun"), [("sft", "rows"), ("labelled", "answers")])
def test_rows_that_are_partly_left_out_are_told(
    tmp_path: Path, renderer: Renderer, kind: Any, noun: str
) -> None:
    labelled = {
        "prompt": [{"role": "system", "content": "s" * 300}, {"role": "user", "content": LONG}],
        "response": "ho",
        "label": True,
    }
    lost = of("sft", LONG) if kind == "sft" else [labelled]
    data = data_of(tmp_path / "rows.jsonl", *of(kind, SHORT, 9), *lost * 3)
    found = render_rows(renderer, data, kind, "max_len", 100)
    assert found.refused == ""
    if kind == "sft":
        (told,) = found.warned
        assert told.startswith(
            f"3 of 12 {noun} would be left out (no answer within the token limit: 3; for instance"
            f" {tmp_path}/rows.jsonl, row 10)"
        )
        assert found.items == 9
    else:  # their prompts are cut instead, as in the stage
        assert found.warned == (f"3 of 12 {noun} have more tokens than max_len=100 and would be cut",)
        assert found.items == 12


@pytest.mark.parametrize("kind", ["sft", "preference", "labelled", "scored", "prompt"])
def test_cut_rows_of_every_kind_are_told(tmp_path: Path, renderer: Renderer, kind: Any) -> None:
    data = data_of(tmp_path / "rows.jsonl", *of(kind, SHORT, 5), *of(kind, LONG, 5))
    found = render_rows(renderer, data, kind, "max_len", 100)
    assert found.refused == "" and len(found.warned) == 1 and found.warned[0].startswith("5 of 10")
    assert render_rows(renderer, data, kind, "max_len", 400) == Rendered("", (), 10)


def test_only_the_first_rows_of_a_large_file_are_made_and_this_is_said(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "SAMPLED_ROWS", 5)
    lost = data_of(tmp_path / "lost.jsonl", *of("sft", LONG, 6))
    found = render_rows(renderer, lost, "sft", "max_len", 100)
    assert found.refused == "" and found.warned[0].startswith("5 of the first 5 rows would be left out")
    assert found.items == 1, "at most the row that was not made is trained on"
    monkeypatch.setattr(template_rows, "CHECKED_ROWS", 6)
    assert render_rows(renderer, lost, "sft", "max_len", 100).items is None, "there may be more rows"
    monkeypatch.setattr(sample, "SAMPLE_SECONDS", 0.0)
    assert render_rows(renderer, lost, "sft", "max_len", 100).warned == ()


RECIPES = {  # fields of the stage, what its rows hold, and what it counts
    "sft": ("max_epochs: 2, ranks: {gpus: 0}", "sft", "rows"),
    "reward": ("stage: reward_model, model: base", "preference", "pairs"),
    "dpo": ("policy: base", "preference", "pairs"),
    "kto": ("policy: base", "preference", "answers"),
}


@pytest.mark.parametrize("stage", RECIPES)
def test_rows_that_fill_no_batch_are_told_for_every_stage(
    tmp_path: Path,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    fields, kind, noun = RECIPES[stage]
    fields += ", data: {sources: rows.jsonl}, max_len: 400, train_batch_size: 64"
    data_of(tmp_path / "rows.jsonl", *of(kind, SHORT, 20))
    (tmp_path / "recipe.yaml").write_text(
        f"{{name: n, base_model: {renderer.tokenizer.name_or_path}, stages: {{{stage}: {{{fields}}}}}}}"
    )

    def warned(*overrides: str) -> list[str]:
        main(["validate", "recipe.yaml", *overrides, "--here"])
        printed = capsys.readouterr()
        assert "stages." not in printed.err, printed.err
        return [line for line in printed.out.splitlines() if line.startswith("warning")]

    count = 40 if stage == "kto" else 20
    epochs = 2 if stage == "sft" else 1
    (told,) = warned()
    assert (
        told
        == f"warning: stages.{stage}.data: {count} {noun} do not fill a batch of train_batch_size=64: each"
        f" epoch is one step with all of them, {epochs} in all; lower train_batch_size or give more {noun}"
    )
    (told,) = warned(f"{stage}.train_batch_size=16", f"{stage}.micro_train_batch_size=1")
    assert "steps, which train almost nothing" in told
    assert warned(f"{stage}.train_batch_size=2", f"{stage}.micro_train_batch_size=1") == []


def test_prompts_are_counted_against_the_iterations_and_against_those_asked_for(tmp_path: Path) -> None:
    data = Data(sources="prompts.jsonl")
    reward = "http://127.0.0.1:1"
    ppo = PPO(
        prompts=data, rollout_batch_size=64, n_samples_per_prompt=2, advantage_estimator="grpo", reward=reward
    )
    told = batch_warning(ppo, "prompts", 100)
    assert told.startswith(
        "each episode leaves out 36 of 100 prompts, which fill no iteration of rollout_batch_size=64"
    )
    assert batch_warning(ppo, "prompts", 130) == "", "2 of 130 are few"
    assert batch_warning(ppo, "eval_prompts", 100) == ""
    few = Preferences(
        prompts=data, reward=reward, num_prompts=50, post_processor="dpo", n_samples_per_prompt=4
    )
    assert (
        batch_warning(few, "prompts", 20)
        == "num_prompts=50, and the data has 20 prompts: all of them are used"
    )
    assert batch_warning(few, "prompts", 50) == ""
    assert [few.rows_made(20), few.rows_made(80)] == [20, 50]
    assert few.model_copy(update={"post_processor": "kto"}).rows_made(20) == 80


def test_rows_that_a_preferences_stage_makes_are_counted_against_batches(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data_of(tmp_path / "rows.jsonl", *of("prompt", SHORT, 20))
    (tmp_path / "rw.py").write_text("def f(responses):\n    return [1.0 for _ in responses]\n")
    sampled = (
        "{stage: preferences, policy: base, prompts: {sources: rows.jsonl}, reward: 'rw.py:f',"
        " n_samples_per_prompt: 2, "
    )
    stages = (
        f"{{made: {sampled} post_processor: dpo, prompt_max_len: 100, generate_max_len: 100}}, dpo: {{policy:"
        " base, pairs: made}}"
    )
    (tmp_path / "recipe.yaml").write_text(
        f"{{name: n, base_model: {renderer.tokenizer.name_or_path}, stages: {stages}}}"
    )
    main(["validate", "recipe.yaml", "--here"])
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert told.startswith(
        "warning: stages.dpo.pairs: at most 20 pairs do not fill a batch of train_batch_size=128: each epoch"
        " is one step"
    )
