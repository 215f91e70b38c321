"""PPO that is validated while it trains: planted over-optimisation is stopped, and the best iteration is what
comes out.

The reward of training prompts rises with the share of vowels; that of the validation's falls beyond a share,
as of a reward that is exploited. One run is undisturbed, one is killed and started again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from rlhf_core.config import PPO, Data, Ranks
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.rollout.vllm.vllm_engine import VllmEngine
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.sampling.validation import load_validation
from tests.engines.test_ppo import SHARE, assert_same_end, common, finish, kill_and_finish, write_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 20
VOWELS = """def vowels(responses, rows):
    shares = [sum(c in "aeiou" for c in text) / (1 + len(text)) for text in responses]
    return [-abs(share - 0.3) if row.get("held") else share for share, row in zip(shares, rows)]
"""


def prepare(folder: Path, material: Path, function: Path, held: Path) -> None:
    fields = common(material) | dict(
        actor_learning_rate=3e-3, max_steps=STEPS, init_kl_coef=0.0, export_at=()
    )
    config = PPO(
        **fields,
        advantage_estimator="grpo",
        reward=f"{function}:vowels",
        eval_prompts=Data(sources=str(held)),
        eval_steps=1,
        stop_when=3,
        actor_ranks=Ranks(cpus=SHARE),
    )
    write_request(folder, config, {"base": str(material / "base")})


@pytest.fixture(scope="module")
def run(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("validated")
    (root / "checks.py").write_text(VOWELS)
    rows = [json.loads(line) for line in (material / "questions.jsonl").read_text().splitlines()]
    asked = [row.get("prompt") or row["turns"][0]["content"] for row in rows][:24]
    (root / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "held": True}) + "\n" for text in asked)
    )
    for name in ("whole", "killed"):
        prepare(root / name, material, root / "checks.py", root / "held.jsonl")
    finish(root / "whole")
    return root / "whole"


def test_it_stops_and_the_best_iteration_comes_out(run: Path) -> None:
    lines = read_metrics(run)
    result = RunDir(run).result()
    assert result is not None and len(lines) < STEPS, "over-optimisation was not stopped"
    best = int(result.metrics["eval/best_iteration"])
    rewards = {line["step"]: line["eval/reward/mean"] for line in lines} | {
        best: result.metrics["selection/reward/mean"]
    }
    assert max(rewards.values()) == rewards[best] and 0 < best == len(lines) - 3
    assert all(later < rewards[best] for step, later in rewards.items() if step > best)
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"], "the training's own reward does not tell"
    assert f"the checkpoint is that of iteration {best}, mean reward" in (run / "log.txt").read_text()


def answers_of_the_checkpoint(run: Path, seeds: Literal["seeds", "fresh_seeds"]) -> list[str]:
    config = RunDir(run).request().config
    assert isinstance(config, PPO)
    renderer = Renderer(load_tokenizer(str(run / "checkpoint")), "chat")
    asked = load_validation(config, renderer, [], [], renderer.stop_token_ids, seed=7)
    assert asked is not None
    sampler = VllmEngine(str(run / "checkpoint"), seed=0, max_model_len=config.longest, config=config.engine)
    prompts = [prompt.tokens for prompt in asked.prompts]
    groups = sampler.generate(prompts, getattr(asked, seeds), asked.sampling)
    sampler.close()
    return [
        renderer.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        for group in groups
        for answer in group
    ]


def test_the_checkpoint_answers_as_the_best_iteration_did(run: Path) -> None:
    result = RunDir(run).result()
    assert result is not None
    best, last = (
        [
            json.loads(line)["response"]
            for line in (run / "validation" / f"iteration{step}.jsonl").read_text().splitlines()
        ]
        for step in (int(result.metrics["eval/best_iteration"]), len(read_metrics(run)))
    )
    assert answers_of_the_checkpoint(run, "seeds") == best != last


def test_the_result_is_of_the_best_weights_answers_with_other_seeds(run: Path) -> None:
    """The engines had the weights of the last iteration, and loaded the best."""
    result = RunDir(run).result()
    assert result is not None
    rows = [json.loads(line) for line in (run / "validation" / "checkpoint.jsonl").read_text().splitlines()]
    assert [row["response"] for row in rows] == answers_of_the_checkpoint(run, "fresh_seeds")
    mean = sum(next(iter(row["rewards"].values())) for row in rows) / len(rows)
    assert (
        result.metrics["eval/reward/mean"] == pytest.approx(mean) != result.metrics["selection/reward/mean"]
    )


def test_without_a_kl_no_reference_is_loaded(run: Path) -> None:
    assert "reference" not in (run / "log.txt").read_text()
    for line in read_metrics(run):
        assert not [name for name in line if name.startswith("kl/") or "reference" in name]


def test_answers_are_kept(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "validation" / "iteration1.jsonl").read_text().splitlines()]
    assert len(rows) > 10
    assert all(row["response"] and set(row) == {"prompt", "response", "finished", "rewards"} for row in rows)
    line = read_metrics(run)[0]
    assert sum(next(iter(row["rewards"].values())) for row in rows) / len(rows) == pytest.approx(
        line["eval/reward/mean"]
    )
    assert line["eval/reward/ci_low"] < line["eval/reward/mean"] < line["eval/reward/ci_high"]
    assert line["phase/validate"] > 0


@pytest.mark.long
def test_a_killed_run_ends_the_same(run: Path) -> None:
    killed = run.with_name("killed")
    kill_and_finish(killed)
    assert_same_end(run, killed)
    assert (
        RunDir(killed).result().metrics["eval/best_iteration"]
        == RunDir(run).result().metrics["eval/best_iteration"]
    )  # type: ignore[union-attr]
