"""Real text: the 500 prompts of Arena-Hard v0.1 (code, Unicode, thousands of tokens) through PPO and through
an evaluation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf_core.config import (
    PPO,
    Data,
    EngineConfig,
    Evaluation,
    Ranks,
    RewardJudge,
    Source,
    StageConfig,
)
from rlhf_core.records import StageResult
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.programs import captured
from tests.support.stage_request import stage_request
from tests.support.stage_work import reward_config

QUESTIONS = Path(__file__).parents[3] / "shared" / "data" / "arena-hard" / "v0.1-question.jsonl"
LIMITS = {"prompt_max_len": 96, "generate_max_len": 12}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not QUESTIONS.is_file(), reason="the published question file is not here"),
]


def finish(folder: Path, module: str, config: StageConfig, inputs: dict[str, str]) -> StageResult:
    run = RunDir(folder)
    run.prepare(stage_request(config, inputs))
    process = captured([sys.executable, "-m", module, str(folder)], timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    result = run.result()
    assert result is not None
    return result


def test_500_real_prompts_run_through_ppo_and_evaluation(material: Path, tmp_path: Path) -> None:
    base = {"base": str(material / "base")}
    share = Ranks(cpus=0.25)
    finish(tmp_path / "reward_model", "rlhf_core", reward_config(material, 32), base)
    inputs = base | {"reward_model": str(tmp_path / "reward_model" / "checkpoint")}
    ppo = PPO(
        actor="base",
        prompts=Data(sources=str(QUESTIONS)),
        rollout_batch_size=500,
        train_batch_size=500,
        micro_train_batch_size=50,
        micro_rollout_batch_size=50,
        actor_ranks=share,
        critic_ranks=share,
        reference_ranks=share,
        reward_ranks=share,
        engine=EngineConfig(cpus=0.25, kv_cache_gib=0.5),
        **LIMITS,
    )
    result = finish(tmp_path / "ppo", "rlhf_core", ppo, inputs)
    long = sum(len(json.loads(line)["prompt"]) > 4 * LIMITS["prompt_max_len"] for line in QUESTIONS.open())
    (line,) = read_metrics(tmp_path / "ppo")
    assert result.metrics["data/rows"] == result.metrics["data/kept"] == 500
    assert long > 50 and result.metrics["data/truncated"] >= long
    assert line["prompt/truncated"] == result.metrics["data/truncated"] / 500
    assert 0 <= line["response/truncated"] <= 1 and line["response/length"] <= LIMITS["generate_max_len"]
    assert line["sampler/gap"] < 1e-3

    evaluation = Evaluation(
        models=("ppo",),
        baseline="base",
        questions=Source(path=str(QUESTIONS)),
        judges=(RewardJudge(),),
        engine=EngineConfig(kv_cache_gib=0.5),
        **LIMITS,
    )
    report = finish(
        tmp_path / "evaluation",
        "evaluation",
        evaluation,
        inputs | {"ppo": str(tmp_path / "ppo" / "checkpoint")},
    )
    assert report.metrics["questions"] == 500
    answers = [
        json.loads(line) for line in (tmp_path / "evaluation" / "report" / "answers" / "ppo.jsonl").open()
    ]
    assert len(answers) == 500 and sum(answer["prompt_truncated"] for answer in answers) >= long
