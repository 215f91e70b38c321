"""Asynchronous PPO with all its engines: two engines answer without pause while the actor trains, in an
environment whose tools take time.

Episodes have two answers with a wait between them, of a heavy tail (the longest of a hundred is ten times the
median). Compared with the loop in turns: how fast, what is learned. Killed: the stage's process, and one
engine.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.sources import prompts
from rlhf_core.models.load_model import load_policy
from rlhf_core.objectives.collate import collate
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.measured.probe import NOISE_FREE
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder
from rlhf_core.stages.ppo.sampling.stored import read_collected
from tests.engines.test_ppo import SAVED, SHARE, common, finish, finish_and_keep, start, write_request
from tests.support.micro import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ITERATIONS = 24
BATCH = 8
N = 4
SEED = 7
EARLY = "abcdefghijklm"  # a third of the letters that a model without training writes are among them
WORLD = f"""
import asyncio, json, math, random
from pathlib import Path

class World:
    def __init__(self, seen, median):
        self.seen, self.median = Path(seen), median

    async def rollout(self, task, model):
        first = await model.answer()
        rng = random.Random(first.text + task["prompt"][:20])
        await asyncio.sleep(self.median * rng.lognormvariate(0, 1.0))
        second = await model.answer("more")
        with self.seen.open("a") as file:
            file.write(json.dumps(task["number"]) + "\\n")
        text = first.text + second.text
        return sum(c in "{EARLY}" for c in text) / max(1, len(text))
"""


@pytest.fixture(scope="module")
def folder(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("asynchronous")
    (root / "world.py").write_text(WORLD)
    rows = [json.loads(line) for line in (material / "prompts.jsonl").read_text().splitlines()]
    (root / "prompts.jsonl").write_text(
        "".join(json.dumps({**row, "number": i}) + "\n" for i, row in enumerate(rows))
    )
    return root


def prepare(
    folder: Path, material: Path, name: str, staleness: int, median: float = 0.25, **fields: object
) -> Path:
    environment = {
        "path": str(folder / "world.py:World"),
        "options": {"seen": str(folder / f"{name}.jsonl"), "median": median},
    }
    sizes = dict(
        rollout_batch_size=BATCH, n_samples_per_prompt=N, train_batch_size=16, micro_train_batch_size=8
    )
    here = {
        "prompts": Data(sources=str(folder / "prompts.jsonl")),
        "max_steps": ITERATIONS,
        "num_episodes": ITERATIONS,
        "export_at": (),
    }
    how = {
        "advantage_estimator": "grpo",
        "init_kl_coef": 0.0,
        "max_epochs": 1,
        "min_lr_ratio": 1,
        "generate_max_len": 40,
        "zero_stage": 0,
    }
    # an update changes less than the rewards vary, so that what is learned can be compared
    how |= {"actor_learning_rate": 4e-4}
    engines = {
        "engine": EngineConfig(cpus=SHARE, kv_cache_gib=0.5, num_engines=2),
        "actor_ranks": Ranks(cpus=SHARE),
    }
    turns = {"environment": {**environment, "max_turns": 2, "answer_max_len": 12}, "max_staleness": staleness}
    config = PPO(**{**common(material), **sizes, **here, **how, **engines, **turns, **fields})
    write_request(folder / name, config, {"base": str(material / "base")})
    return folder / name


@pytest.fixture(scope="module")
def asynchronous(folder: Path, material: Path) -> Path:
    run = prepare(folder, material, "asynchronous", 4)
    finish(run)
    return run


@pytest.fixture(scope="module")
def in_turns(folder: Path, material: Path) -> Path:
    run = prepare(folder, material, "in_turns", 0)
    finish(run)
    return run


def seconds(run: Path) -> float:
    """Of an iteration, without the first quarter."""
    times = [line["time"] for line in read_metrics(run)][ITERATIONS // 4 :]
    return (times[-1] - times[0]) / (len(times) - 1)


def seen(folder: Path, name: str) -> Counter[int]:
    return Counter(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))


def learned(run: Path, before: int = 0) -> tuple[float, float]:
    """The mean reward of the last four iterations but `before`, and the standard error of its rise, which is
    four times that or more."""
    lines = read_metrics(run)
    lines = lines[: len(lines) - before]
    first, last = (
        np.array([(line["reward/mean"], line["reward/std"]) for line in part])
        for part in (lines[:4], lines[-4:])
    )
    error = float(np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (4 * BATCH * N)))
    assert last[:, 0].mean() - first[:, 0].mean() > 4 * error
    return float(last[:, 0].mean()), error


def assert_same_end(in_turns: Path, run: Path) -> None:
    """Answers of weights of an age have the rewards of as many iterations before."""
    age = round(float(np.mean([line["rollout/age"] for line in read_metrics(run)[-4:]])))
    (one, its_error), (other, error) = learned(in_turns, age), learned(run)
    assert abs(one - other) < 4 * np.hypot(its_error, error), "the curves end together"


def test_it_learns_as_in_turns_in_less_time(asynchronous: Path, in_turns: Path) -> None:
    ratio = seconds(in_turns) / seconds(asynchronous)
    print(
        f"seconds of an iteration: {seconds(in_turns):.2f} in turns, {seconds(asynchronous):.2f}"
        f" asynchronous, ratio {ratio:.2f}"
    )
    assert_same_end(in_turns, asynchronous)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_every_staleness_learns_the_same(
    staleness: int, in_turns: Path, folder: Path, material: Path
) -> None:
    run = prepare(folder, material, f"staleness{staleness}", staleness)
    finish(run)
    assert max(line["rollout/age"] for line in read_metrics(run)) > 0.5
    assert_same_end(in_turns, run)


def test_no_answer_is_too_old_and_engine_and_trainer_agree(asynchronous: Path) -> None:
    lines = read_metrics(asynchronous)
    assert max(line["rollout/age_max"] for line in lines) <= 4
    assert max(line["rollout/age"] for line in lines) > 0.5
    assert lines[0]["rollout/age_max"] == 0
    assert lines[0]["sampler/ratio_gap"] < 1e-3 < lines[-1]["sampler/ratio_gap"]
    assert all(line["sync/probe_gap"] < 1e-3 and line["policy/first_ratio_gap"] < 1e-5 for line in lines)


def test_every_prompt_is_asked_once(asynchronous: Path, folder: Path) -> None:
    """But for the first, for which a made-up episode is run before engines start."""
    asked = seen(folder, "asynchronous")
    asked[0] -= 1
    assert sum(asked.values()) == ITERATIONS * BATCH * N
    assert set(asked.values()) == {N}


def test_each_token_knows_the_weights_that_sampled_it(folder: Path, material: Path) -> None:
    """Weights change between the two answers of an episode, which are then of different versions."""
    saved = SAVED
    kept = folder / "versions_kept"
    exports = {"export_at": tuple(range(1, saved + 1)), "save_steps": saved, "max_steps": saved + 3}
    run = prepare(folder, material, "versions", 4, **exports)
    finish_and_keep(run, kept)
    collected = read_collected(kept / "state" / f"step-{saved}", order_of(run))
    assert collected.ready
    policies = {0: load_policy(str(material / "base"))}
    policies |= {step: load_policy(str(run / "exports" / f"iteration{step}")) for step in range(1, saved + 1)}

    def logprobs(version: int, document: Document) -> np.ndarray:
        batch = collate([[document]], 0)
        with torch.no_grad():
            return (
                policies[version](batch.tokens, batch.positions, batch.documents, 1.0)
                .logprobs[batch.documents >= 0]
                .numpy()
            )

    right = []
    wrong = []
    for rollouts in collected.ready.values():
        for rollout in rollouts:
            ages = np.zeros(len(rollout.document), int)
            ages[rollout.document.mask_array] = saved - rollout.ages(saved)
            for version in {int(v) for v in ages[rollout.document.mask_array]}:
                here = rollout.document.mask_array & (ages == version)
                right.append(
                    np.abs(logprobs(version, rollout.document) - rollout.sampler_logprobs)[here].max()
                )
                others = {abs(other - version): other for other in policies if other != version}
                wrong.append(
                    np.abs(logprobs(others[min(others)], rollout.document) - rollout.sampler_logprobs)[
                        here
                    ].max()
                )
    # A change between two tokens of one answer leaves keys and values of the older weights: those answers are
    # between two versions.
    assert np.median(right) < NOISE_FREE["float32"] < 10 * NOISE_FREE["float32"] < np.median(wrong)


def order_of(run: Path) -> PromptOrder:
    config = RunDir(run).request().config
    assert isinstance(config, PPO)
    renderer = Renderer(load_tokenizer(RunDir(run).request().inputs["base"]), config.prompts.template)
    return PromptOrder(
        prompts(config.prompts, renderer, config.prompt_max_len, SEED).items, config.rollout_batch_size, SEED
    )


def test_a_dead_engine_is_started_again(folder: Path, material: Path) -> None:
    run = prepare(folder, material, "engine", 4, max_steps=12)
    process = start(run)
    log = run / "log.txt"
    wait_until(lambda: len(read_metrics(run)) > 3 or process.poll() is not None, "a few iterations", 600)
    (pid,) = [line for line in log.read_text().splitlines() if "sampler is up, process" in line]
    os.kill(int(pid.partition("process ")[2].partition(",")[0]), signal.SIGKILL)
    assert process.wait(timeout=900) == 0, log.read_text()[-3000:]
    text = log.read_text()
    # if it had requests then, they were asked again (test_dispatch.py)
    assert "starting the engines [0] anew" in text
    lines = read_metrics(run)
    assert len(lines) == 12 and all(line["sync/probe_gap"] < 1e-3 for line in lines)


@pytest.mark.parametrize("kill_at", [2, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 3, 5, 7))])
def test_a_killed_run_trains_on_each_prompt_once(folder: Path, material: Path, kill_at: int) -> None:
    """What is asked again after a kill was not trained on before. A file of rollouts has all of an
    iteration's eight episodes."""
    iterations = 9
    small = dict(rollout_batch_size=4, n_samples_per_prompt=2, train_batch_size=8, micro_train_batch_size=4)
    run = prepare(
        folder,
        material,
        f"killed{kill_at}",
        3,
        0.1,
        max_steps=iterations,
        save_steps=2,
        logging_steps=1,
        **small,
    )
    process = start(run)
    wait_until(
        lambda: len(read_metrics(run)) >= kill_at or process.poll() is not None,
        "the iteration of the kill",
        600,
    )
    process.kill()
    process.wait()
    assert RunDir(run).result() is None, "the run ended before it could be killed"
    finish(run)
    files = [run / "rollouts" / f"iteration{number}.jsonl" for number in range(1, iterations + 1)]
    trained = Counter(
        json.loads(line)["messages"][0]["content"] for file in files for line in file.read_text().splitlines()
    )
    asked = Counter(prompt.messages[0]["content"] for prompt, _ in order_of(run).take(0, iterations * 4))
    # no prompt is lost, none is trained on twice
    assert trained == {text: 2 * times for text, times in asked.items()}
