"""GPU-hours and money of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from filelock import FileLock

from evaluation.dashboard.artifacts_folder import Folder
from evaluation.dashboard.cost import Bill, bill, gpus_of
from evaluation.dashboard.state import run_stages
from rlhf_core.config import PPO, SFT, Recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.records import Ranks
from rlhf_core.runs.run_dir import LOCK, LOG, REQUEST, RESULT
from tests.support.finished_run import DATA, PROMPTS
from tests.unit.evaluation.dashboard.conftest import STARTED, Artifacts


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(STARTED + seconds))


def ran(run_dir: Path, begun: float, seconds: float | None = None, code: int = 0) -> None:
    """Appends an attempt to the log, `begun` seconds after the run; seconds None: killed with whoever started
    it."""
    end = (
        ""
        if seconds is None
        else f"+++ {stamp(begun + seconds)} x ended after {seconds:.2f} s with code {code}\n"
    )
    with (run_dir / LOG).open("a") as log:
        log.write(f"--- {stamp(begun)} x\nworking\n{end}")


def on_gpus(run_dir: Path, gpus: int) -> None:
    request = json.loads((run_dir / REQUEST).read_text())
    request["config"]["ranks"] = {"num_ranks_per_node": gpus, "gpus": 1.0}
    (run_dir / REQUEST).write_text(json.dumps(request))


def of(artifacts: Artifacts, run: str = "first") -> Bill:
    folder = Folder(artifacts.path)
    folder.look()
    record = folder.run("demo", run)
    return bill(folder, record, run_stages(folder, record))


def test_the_sum_of_all_attempts_of_this_run(artifacts: Artifacts) -> None:
    sft = artifacts.stage("sft")
    on_gpus(sft, 4)
    ran(sft, -5000, 1000)  # of an earlier run
    ran(sft, 10, 100, 137)
    ran(sft, 200, 170)
    ran(artifacts.stage("reward_model"), -100, 50)  # found done
    found = of(artifacts)
    lines = {line.stage: line for line in found.lines}
    assert lines["sft"][1:] == (2, 0, 270.0, 4.0, 0.0) and found.gpu_hours == pytest.approx(4 * 270 / 3600)
    assert lines["reward_model"].attempts == 0 and lines["reward_model"].seconds == 0
    assert not found.at_least and found.money == "", "the recipe gives no price"


def test_an_attempt_without_an_end_makes_it_a_lower_bound(artifacts: Artifacts) -> None:
    on_gpus(artifacts.stage("sft"), 2)
    ran(artifacts.stage("sft"), 10)
    ran(artifacts.stage("sft"), 60, 36)
    found = of(artifacts)
    assert found.at_least and found.gpu_hours == pytest.approx(2 * 36 / 3600) and found.lines[0].unended == 1


def test_a_stage_that_runs_counts_until_now(artifacts: Artifacts) -> None:
    sft = artifacts.stage("sft")
    record = artifacts.record("second", started=time.time() - 1800)
    on_gpus(sft, 1)
    (sft / RESULT).unlink()
    with FileLock(sft / LOCK), FileLock(record.with_suffix(".lock")):
        ran(sft, time.time() - STARTED - 900)
        found = of(artifacts, "second")
        assert found.lines[0].unended == 0 and 900 <= found.lines[0].seconds < 1000 and not found.at_least


@pytest.mark.parametrize(
    ("price", "money"),
    [
        ({"gpu_hour": 2.5}, "3.50 USD"),
        ({"gpu_hour": 2.5, "currency": "EUR"}, "2.50 EUR + 1.00 USD"),
        (None, "1.00 USD"),
        ({"gpu_hour": "dear"}, "1.00 USD"),
        (["?"], "1.00 USD"),
    ],
)
def test_money_with_the_fees_of_judges(artifacts: Artifacts, price: object, money: str) -> None:
    artifacts.record("priced", "done", STARTED + 600 + 3600, config={"cost": price})
    on_gpus(artifacts.stage("sft"), 2)
    ran(artifacts.stage("sft"), 10, 1800)
    evaluation = artifacts.stage("evaluation")
    ran(evaluation, 1900, 10)
    result = json.loads((evaluation / RESULT).read_text())
    result["metrics"] |= {
        "judge_cost/gpt": 0.5,
        "judge_cost": 0.25,
        "answer_cost/remote": 0.25,
        "judge_cost/bad": None,
        "judge_costly": 9,
    }
    (evaluation / RESULT).write_text(json.dumps(result))
    found = of(artifacts, "priced")
    assert found.money == money and found.fees == 1.0


def test_gpus_that_a_stage_reserves() -> None:
    sft = SFT(data=DATA, ranks=Ranks(num_nodes=2, num_ranks_per_node=4, gpus=1.0))
    assert gpus_of(sft.model_dump(mode="json")) == 8
    one = {"gpus": 1.0}
    roles = {f"{role}_ranks": one for role in ("actor", "critic", "reference", "reward")}
    shared = PPO.model_validate({"prompts": PROMPTS, "colocate_all": True, "engine": one, **roles})
    assert gpus_of(shared.model_dump(mode="json")) == 1, "all roles share it"
    assert gpus_of({"stage": "sft", "unheard": 1}) is None and gpus_of({}) is None


def test_a_price_changes_no_digest(tmp_path: Path) -> None:
    given = {
        "name": "r",
        "base_model": "org/m",
        "artifacts": str(tmp_path),
        "stages": {"sft": {"data": {"sources": "a.jsonl"}}},
    }
    plain, priced = (plan(Recipe.model_validate(given | more)) for more in ({}, {"cost": {"gpu_hour": 2.5}}))
    assert plain["sft"].digest == priced["sft"].digest
