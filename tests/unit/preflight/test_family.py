"""Models of untested families are tried before a run: what cannot be trained or sampled is one sentence with
its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from rlhf_core.hub.model_config import NO_FLOAT16
from rlhf_core.preflight.families import family
from rlhf_core.preflight.families.family import family_problems, option_problems
from rlhf_core.preflight.model_checks import sampling_problems, unfit_models
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Node, plan
from tests.support.text_rows import rows_of_text

RECIPE = """
name: tiny
base_model: base
stages:
  sft: {data: {sources: rows.jsonl}}
  reward_model: {model: base, data: {sources: pairs.jsonl}}
  ppo:
    actor: sft
    reward: reward_model
    prompts: {sources: prompts.jsonl}
    prompt_max_len: 10
    generate_max_len: 10
    rollout_batch_size: 4
    train_batch_size: 4
    micro_train_batch_size: 1
"""


def problems(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the recipe with a base of this family, which all models start from."""
    monkeypatch.chdir(folder)
    config = CONFIG_MAPPING[kind]()
    config.architectures = [{"gpt_neo": "GPTNeoForCausalLM", "olmo": "OlmoForCausalLM"}.get(kind, "")]
    config.save_pretrained(folder / "base")
    return family_problems(nodes(folder), lambda node, name: str(folder / "base"))


def nodes(folder: Path, *overrides: str) -> tuple[Node, ...]:
    (folder / "recipe.yaml").write_text(RECIPE)
    return tuple(plan(load_recipe(folder / "recipe.yaml", overrides)).nodes)


@pytest.mark.long
def test_a_family_that_works_everywhere_has_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(tmp_path, "olmo", monkeypatch) == []


def test_a_model_that_is_not_causal_is_refused_where_it_is_first_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = problems(tmp_path, "bert-generation", monkeypatch)
    base = tmp_path / "base"
    assert (
        found[0]
        == f"stages.sft.model: {base}: BertGenerationDecoder reads the tokens after each token too: it is no"
        " causal language model"
    )
    assert len(found) == len({problem.partition(":")[0] for problem in found}), (
        "each problem is reported once"
    )


@pytest.mark.long
def test_a_model_that_vllm_has_no_class_for_is_refused_where_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = problems(tmp_path, "gpt_neo", monkeypatch)
    assert found.startswith(f"stages.ppo.actor: {tmp_path / 'base'}: vLLM ")
    assert found.endswith(
        "has no class for GPTNeoForCausalLM, so it cannot answer: set engine.kind to transformers, or train"
        " it by SFT, DPO or KTO"
    )


def test_an_option_that_vllm_does_not_have_is_told(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    todo = nodes(tmp_path, "ppo.engine.options={max_num_seq: 4}")
    (told,) = option_problems(todo)
    assert told.startswith("stages.ppo.engine.options: vLLM ")
    assert told.endswith("has no option 'max_num_seq'; did you mean max_num_seqs?")


def test_a_tested_family_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_ask", lambda *_: pytest.fail("it is tried"))
    assert problems(tmp_path, "qwen3", monkeypatch) == []


def test_a_process_that_ends_early_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "ENVIRONMENT", {"PYTHONHOME": str(tmp_path)})
    assert problems(tmp_path, "olmo", monkeypatch) == []


def quantised(folder: Path, method: str, **config: object) -> Path:
    (folder / "base").mkdir()
    described = {"model_type": "llama", "quantization_config": {"quant_method": method}} | config
    (folder / "base" / "config.json").write_text(json.dumps(described))
    return folder / "base"


@pytest.mark.parametrize(
    ("method", "config", "told"),
    rows_of_text(
        """
    awq | {} | 'base has weights quantised as awq, which cannot be trained so: name its checkpoint in bfloat16'
    fp8 | {model_type: mistral3, text_config: {model_type: ministral3}} | quantised as fp8 of a model with several parts
    mxfp4 | {} | null
    fp8 | {} | null
    """,
        yaml_columns={2},
    ),
)
def test_quantised_weights_that_cannot_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, config: dict[str, object], told: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    quantised(tmp_path, method, **config)
    sft, reward_model, _ = nodes(tmp_path)
    for node in (sft, reward_model):
        found = [problem for (_, fault), problem in unfit_models(node).items() if fault == "quantised"]
        assert (told is None and not found) or (len(found) == 1 and str(told) in found[0])


def test_ppo_does_not_start_from_quantised_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = str(quantised(tmp_path, "mxfp4"))
    *_, ppo = nodes(tmp_path, "ppo.actor=base")
    (found,) = sampling_problems(ppo, lambda name: base)
    assert found.startswith("stages.ppo.actor: ")
    assert "has weights quantised as mxfp4, and vLLM would take no new ones" in found
    *_, ppo = nodes(tmp_path)
    assert sampling_problems(ppo, lambda name: base) == []


@pytest.mark.parametrize(
    ("kind", "dtype", "told"), [("gemma2", "float16", 1), ("gemma2", "bfloat16", 0), ("qwen2", "float16", 0)]
)
def test_float16_is_refused_where_activations_overflow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, told: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": kind}))
    *_, ppo = nodes(tmp_path, f"ppo.dtype={dtype}", "ppo.zero_stage=2")
    found = sampling_problems(ppo, lambda name: str(tmp_path / "base"))
    assert len(found) == told
    assert all(problem.startswith("stages.ppo.dtype: ") and kind in problem for problem in found)


def test_no_float16_is_what_vllm_refuses() -> None:
    from vllm.config import model

    assert set(model._FLOAT16_NOT_SUPPORTED_MODELS) == NO_FLOAT16


def test_options_that_deepspeed_does_not_have_are_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = '{"zero_optimization": {"overlap_com": false}}'
    right = '{"zero_optimization": {"overlap_comm": false}}'
    found = nodes(tmp_path, f"stages.sft.deepspeed={wrong}", f"stages.ppo.deepspeed={right}")
    told = option_problems(found)
    assert [problem.partition(": DeepSpeed ")[0] for problem in told] == ["stages.sft.deepspeed"]
    assert told[0].endswith(
        "has no option 'zero_optimization.overlap_com'; did you mean zero_optimization.overlap_comm?"
    )
