"""A curriculum over a resume: the same prompts as without a kill, each group measured once; with filtering,
answers sampled ahead, and answers that go on beside the training."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO, Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rollout.dispatch import Background
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.timeline import Timeline
from rlhf_core.stages.ppo.iteration import Carried, Iteration, measure_pass_rates, ppo_iteration
from rlhf_core.stages.ppo.iteration_loop import save_state
from rlhf_core.stages.ppo.ppo_setup import schedule_of, setup_of
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.collector import Collected, Collector
from rlhf_core.stages.ppo.sampling.curriculum_draws import CurriculumDraws
from rlhf_core.stages.ppo.sampling.group_filter import GroupFilter
from rlhf_core.stages.ppo.sampling.sampled_answers import Setup
from rlhf_core.stages.ppo.sampling.stored import read_ahead, read_collected
from tests.support.states import wait_until_complete
from tests.unit.stages.ppo.test_ppo_export import Roles
from tests.unit.stages.ppo.test_ppo_export import ppo as run_ppo
from tests.unit.stages.ppo.test_ppo_sampling import Fleet

N = 2
BATCH = 4
ITERATIONS = 6
PROMPTS = [Prompt(({"role": "user", "content": str(i)},), [i], {}, False) for i in range(12)]
PATHS = {"reward:reward_model": "rm"}


def new_setup(**fields: Any) -> Setup:
    sizes = {"rollout_batch_size": BATCH, "n_samples_per_prompt": N, "train_batch_size": BATCH * N}
    config = PPO.model_validate(
        {
            "prompts": {"sources": "p.jsonl"},
            "advantage_estimator": "grpo",
            "curriculum": {"right": 1.0, "solved_every": 2},
            "num_episodes": 10,
            **sizes,
            **fields,
        }
    )
    return setup_of(config, PROMPTS, PATHS, [0], 7)


def score(prompt: int, answer: int) -> float:
    """Multiples of 3 are solved, of 5 never, the others by one answer of two."""
    if prompt % 3 == 0:
        return 1.0
    return float(answer and prompt % 5 != 0)


def save(setup: Setup, carried: Carried, folder: Path, collector: Any = None) -> None:
    roles: Any = SimpleNamespace(save_state=lambda folder: None)
    save_state(roles, carried, collector, None, setup.order.curriculum, folder)


def resumed(folder: Path, carried: Carried, **fields: Any) -> tuple[Setup, Carried]:
    """As another process takes a state up."""
    setup = new_setup(**fields)
    assert setup.order.curriculum is not None
    setup.order.curriculum.read(folder)
    return setup, carried._replace(ahead=read_ahead(folder, setup.order, N))


@pytest.mark.parametrize("kill_at", [1, 2, 5])
@pytest.mark.parametrize(
    "fields",
    [{}, {"dynamic_filtering": True}, {"max_staleness": 1}],
    ids=["in turn", "filtered", "ahead"],
)
def test_a_resumed_run_asks_for_the_same_prompts(
    fields: dict[str, Any], kill_at: int, tmp_path: Path
) -> None:
    asked = []
    curves = []
    for killed in (False, True):
        setup, carried = new_setup(**fields), Carried(0, {})
        requests, curve = [], []
        for number in range(ITERATIONS):
            fleet: Any = Fleet(score)
            schedule = schedule_of(setup.config, number, ITERATIONS, 7)
            done = ppo_iteration(fleet, setup, carried, 0.0, schedule, number == ITERATIONS - 1)
            carried = done.carried
            requests += [*fleet.requested, fleet.seeds]
            curve.append({name: v for name, v in done.metrics.items() if name.startswith("curriculum/")})
            if killed and number + 1 == kill_at:
                save(setup, carried, tmp_path)
                setup, carried = resumed(tmp_path, carried, **fields)
        asked.append(requests)
        curves.append(curve)
    assert asked[0] == asked[1]
    assert curves[0] == curves[1]
    assert curves[0][0] != curves[0][-1] and len(curves[0][0]) == 3
    unseen = [metrics["curriculum/unseen"] for metrics in curves[0]]
    assert unseen == sorted(unseen, reverse=True) and unseen[0] < 1


def test_filtering_measures_all_that_it_looked_at_and_draws_on() -> None:
    setup = new_setup(dynamic_filtering=True)
    fleet: Any = Fleet(score)
    done = ppo_iteration(fleet, setup, Carried(0, {}), 0.0, schedule_of(setup.config, 0, 9, 7))
    requested = [prompt for request in fleet.requested for prompt in request]
    assert done.carried.position == len(requested) > BATCH
    known = set(requested)
    assert done.metrics["curriculum/unseen"] == pytest.approx(1 - len(known) / 12)
    solved = sum(prompt % 3 == 0 for prompt in known)
    assert done.metrics["curriculum/solved"] == pytest.approx(solved / 12)
    rates = [np.mean([score(prompt, answer) for answer in range(N)]) for prompt in known]
    assert done.metrics["curriculum/mean_pass_rate"] == pytest.approx(np.mean(rates))


def test_the_curriculum_learns_what_to_ask() -> None:
    """Prompts that one of two answers solves come most, solved ones at most once in two times the prompts."""
    setup = new_setup()
    carried = Carried(0, {})
    fleet: Any = Fleet(score)
    for number in range(60):
        schedule = schedule_of(setup.config, 0, 60, 7)
        carried = ppo_iteration(fleet, setup, carried, 0.0, schedule, number == 59).carried
    late = [prompt for request in fleet.requested[20:] for prompt in request]
    times = {prompt: late.count(prompt) for prompt in range(12)}
    between = [times[prompt] for prompt in range(12) if prompt % 3 and prompt % 5]
    solved = [times[prompt] for prompt in range(12) if prompt % 3 == 0]
    never = [times[prompt] for prompt in (5, 10)]
    assert min(between) > max(solved) and max(solved) <= 160 / 24 + 1
    assert np.mean(between) > 1.5 * np.mean(never)


@pytest.mark.parametrize("save_steps", [1, 2])
@pytest.mark.parametrize("killed_at", [2, 3, 5])
def test_a_killed_stage_draws_the_same_prompts(
    save_steps: int, killed_at: int, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole stage with doubles for its models; each prompt's answer is right by its number of tokens."""

    def run(folder: str, killed_at: int | None = None) -> dict[int, list[str]]:
        roles = Roles()
        drawn: dict[int, list[str]] = {}

        def iteration(_: object, setup: Setup, carried: Carried, *rest: object) -> Iteration:
            if roles.weights + 1 == killed_at:
                wait_until_complete()
                raise KeyboardInterrupt
            roles.weights += 1
            places = range(carried.position, carried.position + 8)
            prompts = [prompt for prompt, _ in setup.order.take(places.start, 8)]
            rewards = np.array([[float(len(prompt.tokens) % 2)] for prompt in prompts])
            setup.order.curriculum.measure(places, rewards)  # type: ignore[union-attr]
            drawn[roles.weights] = [str(prompt.messages) for prompt in prompts]
            later = carried._replace(position=places.stop)
            nothing = Timeline(0.0, [])
            return Iteration({"reward/mean": 0.1}, 0.0, later, [], Rewards({}, {}), nothing, {})

        doubles = {"start_fleet": lambda *_: roles, "ppo_iteration": iteration}
        fields = {"save_steps": save_steps, "curriculum": {"right": 1.0}}
        where = RunDir(tmp_path / folder)
        if killed_at is None:
            run_ppo(material, where, monkeypatch, doubles=doubles, **fields)
        else:
            with pytest.raises(KeyboardInterrupt):
                run_ppo(material, where, monkeypatch, doubles=doubles, **fields)
        return drawn

    whole = run("whole")
    assert len(whole) == 5
    run("killed", killed_at)
    first = 1 + (killed_at - 1) // save_steps * save_steps
    assert run("killed") == {number: whole[number] for number in range(first, 6)}


def test_prompts_know_their_source(material: Path, tmp_path: Path) -> None:
    for name, count in (("a", 4), ("b", 40)):
        rows = [{"prompt": f"{name} {i}"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = [
        {"path": str(tmp_path / f"{n}.jsonl"), "probability": p} for n, p in (("a", 0.25), ("b", 0.75))
    ]
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    found = load_prompts(Data.model_validate({"sources": mixture}), renderer, 48, 0)
    names = ["ab"[source] for source in found.sources]
    assert names == [prompt.row["prompt"][0] for prompt in found.items]
    assert names.count("a") == 4 and 12 <= names.count("b") <= 15


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


class Recorded(CurriculumDraws):
    """Records the places that were measured, and the prompts that were drawn."""

    measured: list[int]
    prompts: dict[int, int]

    def prompt_at(self, place: int) -> int:
        prompt = super().prompt_at(place)
        assert self.prompts.setdefault(place, prompt) == prompt, "a place keeps its prompt"
        return prompt

    def measure(self, places: Sequence[int], rewards: np.ndarray) -> None:
        super().measure(places, rewards)
        self.measured += places


class World:
    """Answers and rewards prompts after times of their own."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    async def answer(self, prompt: Prompt, seed: int) -> list[Rollout]:
        await asyncio.sleep(0.001 * self._rng.lognormvariate(0, 1.5))
        number = prompt.tokens[0]
        logprobs = np.zeros(4, np.float32)
        documents = [Document([number, number, j, 3], [False, True, True, True]) for j in range(N)]
        return [Rollout(prompt, found, logprobs, True, versions=[(1, 0)]) for found in documents]

    def reward(self, rollouts: Sequence[Rollout], allowed: int) -> Rewards:
        scores = [score(rollout.document.tokens[0], rollout.document.tokens[2]) for rollout in rollouts]
        return Rewards({"reward_model": np.array(scores)}, {})


@pytest.mark.parametrize("kill_at", [1, 3, 6])
@pytest.mark.parametrize("filtered", [False, True])
def test_beside_the_training_each_place_is_measured_once(
    background: Background, tmp_path: Path, filtered: bool, kill_at: int
) -> None:
    fields = {"max_staleness": 2, "dynamic_filtering": filtered}
    measured: list[int] = []
    prompts: dict[int, int] = {}
    world: Any = World()

    def watched() -> Setup:
        setup = new_setup(**fields)
        curriculum = setup.order.curriculum
        assert curriculum is not None
        curriculum.__class__ = Recorded
        curriculum.measured, curriculum.prompts = measured, prompts  # type: ignore[attr-defined]
        return setup

    def train(where: Background, setup: Setup, first: int, last: int, known: Collected) -> Collector:
        group_filter = GroupFilter(world, setup, {}) if filtered else None
        how: dict[str, Any] = {"known": known, "group_filter": group_filter, "iteration": first}
        collector = Collector(where, world.answer, setup.order, 2, 8, **how)
        for _ in range(first, last):
            sampled = collector.take()
            assert sampled is not None
            rewards = sampled.rewards or world.reward(sampled.rollouts, 0)
            measure_pass_rates(setup, sampled.measured, rewards)
            collector.next_iteration()
        return collector

    setup = watched()
    collector = train(background, setup, 0, kill_at, Collected())
    save(setup, Carried(0, {}), tmp_path, collector)
    before = setup.order.curriculum.metrics()  # type: ignore[union-attr]
    collector.stop()
    at_kill = read_places(tmp_path)
    prompts = {place: prompt for place, prompt in prompts.items() if place < at_kill}
    again = Background()  # as another process, after a kill
    try:
        setup = watched()
        setup.order.curriculum.read(tmp_path)  # type: ignore[union-attr]
        assert setup.order.curriculum.metrics() == before  # type: ignore[union-attr]
        known = read_collected(tmp_path, setup.order)
        assert known.open or known.ready, "something was being answered"
        last = train(again, setup, kill_at, 8, known).state()
    finally:
        again.close()
    assert len(set(measured)) == len(measured), "each group once"
    waiting = {*last.open, *last.ready.keys() - set(last.counted), *last.dropped}
    assert {*measured, *waiting} == set(range(last.next)), "and none is lost"


def read_places(folder: Path) -> int:
    """Returns the place after the last draw that a state has."""
    with np.load(folder / "curriculum.npz") as stored:
        return int(stored["next_place"])
