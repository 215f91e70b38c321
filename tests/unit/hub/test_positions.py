"""Positions of a model by its config.json: as vLLM 0.32 counts them; and stages that need more end at their
start with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.__main__ import main
from rlhf_core.config import PPO, Data, Preferences, StageConfig
from rlhf_core.hub.positions import positions_of
from rlhf_core.runs.launch import StageFailed
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request
from tests.support.text_rows import rows_of_text

LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 2.0},
    "sliding_attention": {"rope_type": "default"},
}


@pytest.mark.parametrize(
    ("config", "positions"),
    rows_of_text(
        """
    {max_position_embeddings: 512} | 512
    {n_positions: 128} | 128
    {max_seq_len: 256} | 256
    {max_position_embeddings: 512, model_max_length: 256} | 256
    {max_position_embeddings: 512, rope_scaling: null} | 512
    {max_position_embeddings: 512, rope_scaling: {type: linear, factor: 2.0}} | 1024
    {max_position_embeddings: 512, rope_scaling: {rope_type: dynamic, factor: 4.0}} | 2048
    {max_position_embeddings: 512, rope_parameters: {rope_type: linear, factor: 2.0}} | 1024
    {max_position_embeddings: 512, rope_parameters: {full_attention: {rope_type: linear, factor: 2.0}, sliding_attention: {rope_type: default}}} | 1024
    {max_position_embeddings: 512, rope_scaling: {type: yarn, factor: 4.0}} | 512
    {max_position_embeddings: 4096, original_max_position_embeddings: 512, rope_scaling: {type: longrope, short_factor: [1.0, 1.0, 1.0, 1.0], long_factor: [2.0, 2.0, 2.0, 2.0]}} | 4096
    {max_position_embeddings: 2048, rope_scaling: {rope_type: llama3, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 256}} | 2048
    {model_type: gemma3_text, max_position_embeddings: 512, rope_scaling: {rope_type: linear, factor: 8.0}} | 512
    {text_config: {max_position_embeddings: 64}} | 64
    {max_position_embeddings: many} | null
    {} | null
    """,
        yaml_columns={1},
    ),
)
def test_positions_are_those_of_the_engine(config: dict[str, Any], positions: int | None) -> None:
    assert positions_of(config) == positions


@pytest.mark.parametrize("config", [PPO, Preferences])
def test_a_stage_says_so_before_it_starts_anything(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of models that are first known here, as those of the Hub are; the flow does not try again."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 512})
    )
    start = "actor" if config is PPO else "policy"
    stage: StageConfig = config(
        **{start: "base"},
        reward="https://host",
        prompts=Data(sources="p.jsonl"),
        **CRITIC_FREE.get(config, {}),
    )
    request = stage_request(stage, tmp_path / "base", name="s")
    RunDir(tmp_path / "run").prepare(request)
    code = main([str(tmp_path / "run")])
    told = (
        "the model has 512 positions, and prompt_max_len + generate_max_len = 2048 needs more: lower"
        " prompt_max_len or generate_max_len"
    )
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'base'}: {told}")
    assert not StageFailed("s", code, ()).can_retry and code == 2


CRITIC_FREE: dict[Any, dict[str, Any]] = {PPO: {"advantage_estimator": "rloo", "n_samples_per_prompt": 2}}
