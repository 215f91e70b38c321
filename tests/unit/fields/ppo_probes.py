"""Run parts of PPO on a config: credit, updates of actor and critic, iterations, the loop, and the start of
the roles."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.objectives.kl_controller import KLController
from rlhf_core.rewards.clients import Rewards
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.timeline import Timeline
from rlhf_core.stages.ppo import iteration_loop, ppo_setup, train
from rlhf_core.stages.ppo import start_fleet as start
from rlhf_core.stages.ppo.iteration import Carried, Iteration, ppo_iteration
from rlhf_core.stages.ppo.rewards.credit import credit, divergence
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.ppo.roles.trained import Critic, Update
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.sampling.validation import REWARD
from rlhf_core.training.engine import AdamW
from rlhf_core.training.zero.zero_options import engine_config, options_of
from tests.support.stage_request import stage_request
from tests.unit.fields.change import World
from tests.unit.stages.ppo.test_ppo_sampling import PROMPTS, Fleet

SIZES: dict[str, Any] = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 4,
    "micro_train_batch_size": 4,
    "generate_max_len": 16,
    "prompt_max_len": 32,
}
PATHS = {"actor": "sft", "critic": "rm", "reference": "sft", "reward:reward_model": "rm"}


def ppo(world: World, fields: Mapping[str, Any]) -> PPO:
    prompts = world.rows("prompts", [{"prompt": f"What is {i}?"} for i in range(20)])
    return PPO.model_validate({"prompts": {"sources": prompts}, **SIZES, **fields})


def documents() -> list[Document]:
    """Answers of 1 to 8 tokens to a prompt of two."""
    return [Document(list(range(5, 8 + i)), [False, False, *[True] * (1 + i)]) for i in range(8)]


def drawn(seed: int, scale: float = 0.6) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [
        (scale * generator.normal(size=len(d)) * np.array(d.mask)).astype(np.float32) for d in documents()
    ]


def credited(world: World, fields: Mapping[str, Any]) -> Any:
    """Credit of eight answers: experience, metrics, KL."""
    config = ppo(world, fields)
    prompt = Prompt((), [5, 6], {}, False)
    # one is cut
    rollouts = [
        Rollout(prompt, d, sampler, len(d) != 5) for d, sampler in zip(documents(), drawn(5), strict=True)
    ]
    known = Rewards(
        {source.title: np.array([0.0, 12.0, 2.0, 2.0, 3.0, 5.0, -1.0, 4.0]) for source in config.reward}, {}
    )
    references = drawn(1) if config.has_reference else None
    setup = ppo_setup.setup_of(config, [prompt] * 8, PATHS, [0], 0)
    coef = KLController(config.init_kl_coef, config.kl_target, config.kl_horizon).update(2.0, 64).coef
    found = credit(rollouts, Scores(drawn(0), references, drawn(2), known), coef, {}, config, setup.terms)
    return found, divergence(rollouts, drawn(0), references, found.usable, coef, config)


def stepped(world: World, fields: Mapping[str, Any]) -> Any:
    """An iteration of several optimiser steps of the actor: metrics of each."""
    actor, items = acting(world, fields)
    return actor.train(items, [Update(list(range(8)), 1e-2, 0.5)] * 3).metrics


def averaged(world: World, fields: Mapping[str, Any]) -> Any:
    """The actor's weights after a step, or their moving average."""
    actor, items = acting(world, fields)
    actor.train(items, [Update(list(range(8)), 1e-2, 0.5)])
    if actor.config.ema is None:
        return list(actor.engine.module.parameters())
    with actor.engine.averaged():
        return [weight.detach().clone() for weight in actor.engine.module.parameters()]


def updated(world: World, fields: Mapping[str, Any]) -> Any:
    """Two updates of the actor on experience of older weights: metrics and weights."""
    actor, items = acting(world, fields)
    metrics = [actor.update(items, Update([], 1e-2, 0.5), []) for _ in range(2)]
    return (
        metrics,
        [parameter for parameter in actor.engine.module.parameters() if parameter.requires_grad],
        actor.module.replays,
    )


def rounded(world: World, fields: Mapping[str, Any]) -> Any:
    """What `updated` returns, and whether the actor asks for FP8; layers of tests are too small for it."""
    asked: list[bool] = []
    world.patch.setattr("rlhf_core.training.ranks.use_float8", lambda *_, **__: asked.append(True))
    return updated(world, fields), asked


def encoded(world: World, fields: Mapping[str, Any]) -> Any:
    """What `updated` returns, and what the actor trains of an image encoder, which it does not have here."""
    asked: list[str] = []
    world.patch.setattr(
        "rlhf_core.stages.ppo.roles.role_passes.require_images", lambda trained, _: asked.append(trained)
    )
    rates: list[float] = []
    world.patch.setattr(
        "rlhf_core.training.ranks.AdamW", lambda *fields: rates.append(fields[-1]) or AdamW(*fields)
    )
    return updated(world, fields), asked, rates


def acting(world: World, fields: Mapping[str, Any]) -> tuple[Actor, list[Experience]]:
    """Returns an actor, and experience of older weights."""
    world.patch.setenv("RANK", "0")
    world.patch.setenv("WORLD_SIZE", "1")
    config = ppo(world, fields)
    actor = Actor(ModelSpec(world.place(config.actor), config.dtype, 0, 8, False), config, 0)
    own = [np.zeros(len(d), np.float32) for d in documents()]
    for i, values in actor.logprobs(documents()):
        own[i] = values
    arrays = zip(documents(), own, drawn(0), drawn(1), drawn(2), drawn(3, 2.0), strict=True)
    items = [
        Experience(d, o + old, o + sampler, o + ref, value, a, a)
        for d, o, old, sampler, ref, a in arrays
        for value in [a]
    ]
    return actor, items


def valued(world: World, fields: Mapping[str, Any]) -> Any:
    """An update of the critic: metrics and weights."""
    world.patch.setenv("RANK", "0")
    world.patch.setenv("WORLD_SIZE", "1")
    config = ppo(world, fields)
    critic = Critic(ModelSpec(world.place("rm"), config.dtype, 0, 8, False), config, 0)
    arrays = zip(documents(), drawn(0), drawn(1), drawn(2), strict=True)
    items = [Experience(d, None, None, None, value, 0.0, returns) for d, _, value, returns in arrays]
    metrics = [critic.update(items, Update([], 1e-2, 0.0), []) for _ in range(2)]
    return metrics, list(critic.engine.module.parameters())


def iterated(world: World, fields: Mapping[str, Any]) -> Any:
    """An iteration against a fleet that records its calls."""
    config = ppo(world, fields)
    fleet = Fleet(lambda prompt, j: float(j * prompt * 0.1 if prompt % 2 else 0), sleeps=config.engine.sleep)
    setup = ppo_setup.setup_of(config, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    schedule = ppo_setup.schedule_of(config, 0, 4, 0)
    done = ppo_iteration(fleet, setup, Carried(0, {}), 0.3, schedule)  # type: ignore[arg-type]
    return fleet.requested, fleet.said, fleet.trained, [name for name in done.metrics if "phase" not in name]


def curriculum_prompts(world: World, fields: Mapping[str, Any]) -> Any:
    """The prompts that a curriculum draws over ten batches, whose rewards are measured."""
    config = ppo(world, {"curriculum": {"right": 1.0, **fields}})
    prompts = [Prompt((), [i], {"known": i / 10}, False) for i in range(10)]
    order = ppo_setup.setup_of(config, prompts, PATHS, [0], 0).order
    assert order.curriculum is not None
    drawn_prompts: list[int] = []
    for place in range(0, 40, 4):
        numbers = [prompt.tokens[0] for prompt, _ in order.take(place, 4)]
        rewards = np.array([[number % 3, number % 5] for number in numbers], np.float64)
        order.curriculum.measure(range(place, place + 4), rewards)
        drawn_prompts += numbers
    return drawn_prompts


def iterated_half(world: World, fields: Mapping[str, Any]) -> Any:
    """Whether the loop's iterations train."""
    config = ppo(world, fields)
    rates = []

    def iteration(_: Any, setup: Any, carried: Any, coef: float, schedule: Any, *rest: Any) -> Any:
        rates.append(schedule.rates)
        return Iteration({"reward/mean": 0.1}, 0.0, carried, [], Rewards({}, {}), Timeline(0.0, []), {})

    world.patch.setattr(iteration_loop, "ppo_iteration", iteration)
    setup = ppo_setup.setup_of(config, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    run = RunDir(world.folder / "half")
    roles: Any = Roles()
    iteration_loop.IterationLoop(roles, setup, None, run, 2, 0)._iterate(1)
    return rates


class Roles:
    """Stands for the fleet; its weights are the number of iterations done."""

    zero_stage = 0
    sleeps = False

    def __init__(self) -> None:
        self.weights = 0
        self.references: list[str] = []
        self.engines = SimpleNamespace(adapters_alone=True, sync_weights=lambda version=0: None)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 1

    def probe(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(gap=0.0, bound=0.0)

    def export_actor(self, folder: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.weights))

    def reset_reference(self, folder: Any) -> None:
        self.references.append((folder / "weights").read_text())

    def save_state(self, folder: Any) -> None:
        (folder / "weights").write_text(str(self.weights))

    def state_files(self) -> list[str]:
        return ["weights"]


def looped(world: World, fields: Mapping[str, Any]) -> Any:
    """All iterations of the loop: what each got, what validations asked, and the files that were written."""
    config = ppo(world, fields)
    said = []
    roles = Roles()

    def started(_: Any, paths: Mapping[str, str], *__: Any) -> Roles:
        said.append(paths)
        return roles

    def iteration(_: Any, setup: Any, carried: Any, *rest: Any) -> Any:
        said.append((setup.sampling, setup.order, setup.terms, setup.allowed_failures, rest[:3]))
        roles.weights += 1
        metrics = {"reward/mean": 0.1 * roles.weights}
        return Iteration(metrics, 2.0, carried, [], Rewards({}, {}), Timeline(0.0, []), {})

    def validated(_: Any, fleet: Any, held_out: Any, *rest: Any) -> dict[str, float]:
        said.append((held_out, rest[-1]))
        return {REWARD: 1.0 if rest[-1] else 2.0, "eval/response/length": 1.0}

    def answered(_: Any, fleet: Any, held_out: Any, *__: Any) -> dict[str, float]:
        said.append(held_out)
        return {REWARD: 1.0}

    doubles = {"start_fleet": started, "ppo_iteration": iteration, "validate": validated}
    for name, double in (doubles | {"answer_again": answered, "answer_as": answered}).items():
        world.patch.setattr(train if name == "start_fleet" else iteration_loop, name, double)
    world.patch.setattr(
        iteration_loop, "start_collector", lambda *given: said.append(given[1].config.max_staleness)
    )
    world.patch.setattr(
        train, "start_rollout_group", lambda *_: said.append("asks") if config.continuous else None
    )
    shutil.rmtree(world.folder / "run", ignore_errors=True)
    run = RunDir(world.folder / "run")
    inputs = {name: world.place(name) for name in ("sft", "other", "rm", "rm2")} | {
        "reward_model": world.place("rm")
    }
    request = stage_request(config, inputs)
    run.prepare(request)
    metrics = train.train(request, run, {}, 0.0).metrics
    files = [
        sorted(file.name for file in run.path.glob(f"{folder}/*"))
        for folder in ("exports", "checkpoint", "rollouts", "best")
    ]
    found = {name: value for name, value in metrics.items() if "phase" not in name}
    return said, files, roles.references, found


def started(world: World, fields: Mapping[str, Any]) -> Any:
    """What each role is told at its start."""
    told: list[Any] = []

    class Group:
        def __init__(self, name: str):
            self.name = name

        def build(self, role: type, **given: Any) -> Any:
            told.append((self.name, role.__name__, given))
            return SimpleNamespace(role=self.name, wait=lambda _: (_ for _ in ()).throw(InterruptedError))

    config = ppo(world, fields)
    paths = {name: world.place("rm" if name == "critic" or ":" in name else "sft") for name in config.placed}
    groups: Any = {name: Group(name) for name in config.placed}
    engines = RolloutGroup(config, groups["sampler"], groups["actor"])
    try:
        start.start_fleet(config, paths, SimpleNamespace(pad_token_id=0), 0, groups, engines, False)  # type: ignore[arg-type]
    except InterruptedError:
        return told
    raise AssertionError("no role was waited for")


def sharded(world: World, fields: Mapping[str, Any]) -> Any:
    """The configuration of DeepSpeed for actor and critic."""
    config = ppo(world, fields)
    ranks = config.trained_ranks.items()
    roles = [(role.removesuffix("_ranks"), found) for role, found in ranks]
    adamw = AdamW(config.betas, config.weight_decay, config.max_norm)
    return [
        engine_config(adamw, 3, config.dtype, 4, options_of(config, role, own), True, {})
        for role, own in roles
    ]
