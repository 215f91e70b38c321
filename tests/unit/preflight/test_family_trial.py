"""A small copy of a model's class goes through what training does: families that work have no problem, others
one sentence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rlhf_core.hub.model_config import TESTED
from rlhf_core.preflight.families.family_trial import USES, Trial, Use, try_family
from rlhf_core.preflight.families.small_copy import small_copies
from tests.support.families import FAMILIES, config_class
from tests.support.text_rows import rows_of_text

ALL = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def test_the_tested_families_are_those_of_the_tests() -> None:
    assert {config_class(name).model_type for name in FAMILIES} == TESTED


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "gemma4_text", "granitemoehybrid", "deepseek_v3", "nemotron_h", "phimoe", "llama4_text"),
        *("qwen2_vl", "qwen2_5_vl"),
    ],
)
def test_a_family_that_works_has_no_problem(kind: str, use: Use) -> None:
    assert try_family(CONFIG_MAPPING[kind](), "it", use) == Trial(True)


def test_of_a_multimodal_model_the_language_model_is_tried() -> None:
    assert try_family(transformers.Gemma3Config(), "it", "policy") == Trial(True)


@pytest.mark.parametrize(
    ("kind", "told"),
    rows_of_text("""
    bert-generation | it: BertGenerationDecoder reads the tokens after each token too: it is no causal language model
    glm4v | it: transformers has no causal language model for Glm4vTextConfig
    modernbert-decoder | models of type modernbert-decoder do more with their logits than to scale and cap them
    """),
)
def test_what_cannot_be_trained_is_one_sentence(kind: str, told: str) -> None:
    problem = try_family(CONFIG_MAPPING[kind](), "it", "policy").problem
    assert problem.startswith(told) and "\n" not in problem


def test_a_library_error_is_a_sentence_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    run = transformers.LlamaModel.forward

    def forward(self: Any, *values: Any, position_ids: Any = None, **options: Any) -> Any:
        if position_ids is not None and len(position_ids) > 1:
            raise KeyError("no\nrows")
        return run(self, *values, position_ids=position_ids, **options)

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    found = try_family(CONFIG_MAPPING["llama"](), "it", "policy")
    assert found == Trial(
        True,
        "it: LlamaForCausalLM fails as policy where it has two documents in a row (KeyError: 'no\\nrows')",
    )


def test_an_export_that_loses_a_weight_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.preflight.families.family_trial.checkpoint_weights", lambda *_: [])
    assert "would not be exported as it was" in try_family(CONFIG_MAPPING["llama"](), "it", "policy").problem


def test_a_class_without_a_number_of_layers_is_not_tried() -> None:
    assert try_family(CONFIG_MAPPING["prophetnet"](), "it", "policy") == Trial(False)


def test_a_number_of_layers_takes_no_memory() -> None:
    assert try_family(transformers.LlamaConfig(num_hidden_layers=10**9), "it", "policy") == Trial(True)


def test_a_copy_that_is_not_small_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.preflight.families.family_trial.MOST_PARAMETERS", 1000)
    assert try_family(transformers.LlamaConfig(), "it", "policy") == Trial(False)


def test_one_layer_of_each_kind_stays() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=12)
    small = next(small_copies(config))
    assert small.num_hidden_layers == 2 and set(small.layer_types) == set(config.layer_types)
    assert small.hidden_size == 64 and small.vocab_size == 256 and config.hidden_size == 2304


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_no_class_of_the_auto_mappings_ends_in_a_traceback(use: Use) -> None:
    counts: Counter[str] = Counter()
    for kind in ALL:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # of transformers: it needs other configs
            counts["no default config"] += 1
            continue
        found = try_family(config, kind, use)
        assert "\n" not in found.problem
        counts["not tried" if not found.tried else "refused" if found.problem else "works"] += 1
    print(use, dict(counts))
    assert counts["works"] > 150 and counts["not tried"] < 20
