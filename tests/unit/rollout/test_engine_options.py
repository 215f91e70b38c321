"""Options of vLLM's engine in a recipe: what other fields set is refused, others go to engines and
servers."""

from __future__ import annotations

import argparse
import itertools

import pytest
from pydantic import ValidationError
from vllm import EngineArgs

from rlhf_core.config import EngineConfig, Evaluation
from rlhf_core.config.engines import SPEED_ONLY
from rlhf_core.config.judging.judges import VllmJudge
from rlhf_core.rollout.vllm.environment import (
    GRAPHS,
    engine_flags,
    graphs,
    require_known_options,
    unknown_option,
)
from tests.support.text_rows import rows_of_text


@pytest.mark.parametrize(
    ("name", "told"),
    rows_of_text("""
    dtype | engine.options.dtype: the recipe has a field of this name, so leave it out
    tensor_parallel_size | engine.options.tensor_parallel_size: engine has a field of this name, so leave it out
    pipeline_parallel_size | engine.options.pipeline_parallel_size: engine has a field of this name, so leave it out
    nnodes | engine.options.nnodes: alignflow sets it, so leave it out
    hf_token | engine.options.hf_token: recipes and cards would show it
    """),
)
def test_what_other_fields_set_is_refused(name: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        EngineConfig(options={name: 1})


def test_graphs_are_recorded_for_batches_that_can_be_unless_the_recipe_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert graphs({}) == {}, "a CPU has none"
    monkeypatch.setattr("rlhf_core.rollout.vllm.environment.num_gpus", lambda: 1)
    assert graphs({}) == {"cudagraph_capture_sizes": [*GRAPHS]} and GRAPHS[-1] == 512 and len(GRAPHS) < 25
    # a batch is padded by a quarter at most
    assert all(b - a <= max(16, a // 4) for a, b in itertools.pairwise((8, *GRAPHS[4:])))
    assert graphs({"max_num_seqs": 20})["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 32]
    assert graphs({"max_num_seqs": None}) == graphs({})
    for given in (
        {"compilation_config": {"mode": 0}},
        {"enforce_eager": True},
        {"speculative_config": NGRAM, "max_num_seqs": 2},
    ):
        assert graphs(given) == {}, "vLLM chooses"


def test_pipeline_stages_are_for_engines_that_ray_places_and_draft_nothing() -> None:
    judged = dict(models=["a"], baseline="b", questions={"path": "q.jsonl"}, judges=[{"kind": "rule"}])
    for kind, fields in ((Evaluation, judged), (VllmJudge, {"kind": "vllm", "model": "m"})):
        kind.model_validate(fields)
        with pytest.raises(
            ValidationError,
            match=r"engine\.pipeline_parallel_size is only for the engines of ppo and preferences: leave it out",
        ):
            kind.model_validate({**fields, "engine": {"pipeline_parallel_size": 2}})
    with pytest.raises(
        ValidationError,
        match="speculative_config does not work with pipeline_parallel_size: leave one of them out",
    ):
        EngineConfig(gpus=1, pipeline_parallel_size=2, options={"speculative_config": NGRAM})


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("engine", "gpus", "told"),
    rows_of_text(
        """
    {speculative_config: {method: eagle}} | 1 | a separate draft model would not follow the weight updates: set method to ngram
    {speculative_config: ngram} | 1 | must be a mapping, such as {method: ngram, num_speculative_tokens: 3}
    {additional_config: {true: 1}} | 0 | engine.options.additional_config: the key True is no text: put it in quotes
    {speculative_config: {method: ngram, num_speculative_tokens: 3}} | 0 | engine.options.speculative_config needs a GPU
    {quantization: awq} | 1 | new weights can be loaded only as fp8: set it to fp8
    {quantization: fp8} | 0 | engine.options.quantization needs a GPU, but gpus is 0
    """,
        yaml_columns={1},
    ),
)
def test_formats_and_drafts_that_cannot_work_are_refused(
    engine: dict[str, object], gpus: float, told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        EngineConfig(options=engine, gpus=gpus)
    assert EngineConfig(options={"quantization": "fp8", "speculative_config": NGRAM}, gpus=1).drafts == NGRAM


def test_flags_of_a_server() -> None:
    options = {
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "compilation_config": {"mode": 0},
        "sizes": [1, 2],
        "no": None,
    }
    flags = engine_flags(options)
    parser = argparse.ArgumentParser()
    for name in ("--max-num-seqs", "--kv-cache-dtype", "--compilation-config"):
        parser.add_argument(name)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    read = vars(parser.parse_args(flags))
    assert read.pop("sizes") == [1, 2]
    assert read == dict(
        max_num_seqs="4", enable_prefix_caching=False, kv_cache_dtype="fp8", compilation_config='{"mode": 0}'
    )


def test_options_that_vllm_does_not_have_are_told() -> None:
    pytest.importorskip("vllm")
    assert unknown_option({}) == unknown_option({"max_num_seqs": 4, "enable_expert_parallel": True}) == ""
    assert unknown_option({"max_num_seq": 4}).endswith(
        "has no option 'max_num_seq'; did you mean max_num_seqs?"
    )
    with pytest.raises(ValueError, match=r"engine\.options: vLLM .* has no option 'xyzzy'"):
        require_known_options({"xyzzy": 1})


def test_the_installed_vllm_has_the_options_that_are_in_no_digest() -> None:
    assert SPEED_ONLY - {"batch_size"} <= EngineArgs.__dataclass_fields__.keys()
