"""PPO that scores answers while engines still work on others, with all its engines: the numbers of scoring
them all at once.

Two engines in a run, which is also gone on with from where a kill could have cut it off, and one whose models
wait for the last answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlhf_core.config import PPO, EngineConfig, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import SHARE, assert_same_end, common, finish, finish_and_keep, write_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
# Two answers to a prompt seldom have the same reward.
ODD = "def odd(responses): return [len(response) % 2 + response.count('e') / 10 for response in responses]\n"


class Runs(NamedTuple):
    streamed: Path
    cut_off: Path
    at_once: Path


@pytest.fixture(scope="module")
def runs(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("ppo_stream")
    (root / "checks.py").write_text(ODD)
    runs = Runs(root / "streamed", root / "cut_off", root / "at_once")
    engines = {"engine": EngineConfig(cpus=SHARE, kv_cache_gib=0.5, num_engines=2)}
    how: dict[str, Any] = dict(
        advantage_estimator="grpo", reward=f"{root / 'checks.py'}:odd", actor_ranks=Ranks(cpus=SHARE)
    )
    streamed = PPO(**{**common(material), **how, **engines, "stream_batch_size": 3})
    at_once = PPO(**{**common(material), **how, "max_steps": 1, "save_steps": 0, "export_at": ()})
    for folder, config in ((runs.streamed, streamed), (runs.at_once, at_once)):
        write_request(folder, config, {"base": str(material / "base")})
    finish_and_keep(runs.streamed, runs.cut_off)
    finish(runs.at_once)
    return runs


def test_scores_are_those_of_scoring_all_at_once(runs: Runs) -> None:
    streamed, at_once = (read_metrics(folder) for folder in (runs.streamed, runs.at_once))
    # The first iteration's answers are the same; the update after it follows another schedule.
    scored = ("reward/", "kl/", "return/", "response/", "rollout/", "sampler/", "policy/first_ratio")
    names = [name for name in at_once[0] if name.startswith(scored)]
    assert len(names) > 12
    assert {name: streamed[0][name] for name in names} == pytest.approx(
        {name: at_once[0][name] for name in names}, rel=1e-4, abs=1e-5
    )
    for line in streamed:
        assert line["sampler/gap"] < 1e-3 and line["sync/probe_gap"] < 1e-3
        assert line["policy/first_ratio_gap"] < 1e-5
        assert line["work/sampler/generate"] <= line["phase/generate"] + 0.1 and line["work/actor/score"] > 0


@pytest.mark.long
def test_a_run_that_was_cut_off_ends_with_the_same_curve_and_weights(runs: Runs) -> None:
    finish(runs.cut_off)
    assert_same_end(runs.streamed, runs.cut_off)
