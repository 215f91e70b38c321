"""The PPO stage: data and roles in, iterations, a checkpoint out."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from typing import Any, cast

from rlhf_core import checkpoint
from rlhf_core.advantages import AdaptiveKL, FixedKL, KLController, kl_controller
from rlhf_core.cluster.placement import connect, reserve
from rlhf_core.config import PPO
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.engine.base import learning_rate
from rlhf_core.models.scoring import load_statistics
from rlhf_core.ppo.credit import Shaping
from rlhf_core.ppo.fleet import groups_of, start_fleet
from rlhf_core.ppo.iteration import Optimisation, Sampled, ppo_iteration
from rlhf_core.stage import Outcome, RunDir, StageRequest
from rlhf_core.supervised import order_of_epoch
from rlhf_core.tracking import Tracker, read_metrics

PROBE_DOCUMENTS, PROBE_TOKENS = 4, 128
SHOWN = ("reward/mean", "kl/mean", "policy/first_ratio", "response/length", "phase/generate", "phase/score", "phase/train")


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Trains the actor on its own samples; the output is `checkpoint`. A killed run goes on after its last saved iteration."""
    start = time.monotonic()
    config = cast(PPO, request.config)
    paths = model_paths(config, request.inputs)
    tokenizer = load_tokenizer(paths["actor"], request.trust_remote_code)
    renderer = Renderer(tokenizer, config.prompts.template)
    data = load_prompts(config.prompts, renderer, config.prompt_max_len, request.seed)
    iterations = count_iterations(config, len(data.items))
    shaping = Shaping(
        config.kl_estimator,
        config.gamma,
        config.lambd,
        config.reward_clip,
        load_statistics(paths["reward"]) if config.normalize_reward else None,
        config.whiten_advantages,
        config.sampler_is_cap,
    )
    connect()
    room = reserve(groups_of(config), config.timeout)
    fleet = start_fleet(config, paths, tokenizer.pad_token_id, request.seed, room, request.trust_remote_code)
    print(f"all roles are up after {time.monotonic() - start:.0f} s", flush=True)

    resume = checkpoint.latest(run)
    first = resume.step if resume else 0
    kl = kl_controller(config.init_kl_coef, config.kl_target, config.kl_horizon)
    if resume:
        fleet.load_state(resume.folder)
        fleet.publish_weights()
        kl = restore_controller(kl, resume.loop["kl_coef"])
        print(f"resumed after iteration {first} of {iterations}", flush=True)
    probe = [Document(p.tokens[-PROBE_TOKENS:], [False] * len(p.tokens[-PROBE_TOKENS:])) for p in data.items[:PROBE_DOCUMENTS]]
    fleet.probe(probe)
    tracker = Tracker(run, iterations, first)
    for step in range(first, iterations):
        taken = prompts_of_iteration(len(data.items), step, config.rollout_batch_size, request.seed)
        sampled = Sampled(
            [data.items[i] for i in taken],
            [sample_seed(request.seed, step, i) for i in taken],
            config.n_samples_per_prompt,
            config.temperature,
            config.generate_max_len,
            renderer.stop_token_ids,
        )
        metrics, mean_kl = ppo_iteration(fleet, sampled, kl.coef, shaping, optimisation(config, step, iterations, request.seed), probe)
        kl = kl.update(mean_kl, len(taken) * config.n_samples_per_prompt)
        done = step + 1
        if done % config.logging_steps == 0 or done == iterations:
            tracker.log(done, metrics, show=SHOWN)
        if config.save_steps and done % config.save_steps == 0 and done < iterations:
            checkpoint.save(run, done, config.keep_checkpoints, {"kl_coef": kl.coef}, fleet.save_state)
    tracker.close()
    shutil.rmtree(run / "checkpoint", ignore_errors=True)
    fleet.export_actor(run / "checkpoint")
    return Outcome(final_metrics(read_metrics(run.path)) | data.report.metrics("data"), {"checkpoint": "checkpoint"})


def model_paths(config: PPO, inputs: dict[str, str]) -> dict[str, str]:
    """Each role's model; the critic starts from the reward model and the reference from the actor unless told otherwise."""
    names = {
        "actor": config.actor,
        "critic": config.critic or config.reward,
        "reference": config.reference or config.actor,
        "reward": config.reward,
    }
    return {role: inputs[name] for role, name in names.items()}


def count_iterations(config: PPO, num_prompts: int) -> int:
    """Iterations of the run. Raises ValueError when the prompts do not fill one."""
    if num_prompts < config.rollout_batch_size:
        raise ValueError(
            f"ppo needs rollout_batch_size={config.rollout_batch_size} prompts, the data has {num_prompts}: lower it or add prompts"
        )
    total = num_prompts // config.rollout_batch_size * config.num_episodes
    return min(total, config.max_steps) if config.max_steps else total


def prompts_of_iteration(num_prompts: int, step: int, batch: int, seed: int) -> list[int]:
    """Indices of an iteration's prompts: each episode is one seeded shuffle cut into batches; the remainder waits for the next."""
    episode, position = divmod(step, num_prompts // batch)
    return list(order_of_epoch(num_prompts, episode, seed)[position * batch : (position + 1) * batch])


def sample_seed(seed: int, step: int, index: int) -> int:
    """The sampler's seed for a prompt: a function of run, iteration and prompt."""
    return random.Random(f"{seed}-{step}-{index}").getrandbits(48)


def optimisation(config: PPO, step: int, iterations: int, seed: int) -> Optimisation:
    """Batches and learning rates of one iteration. The actor rests for the first `freezing_actor_steps` iterations."""
    per_iteration = config.rollout_batch_size * config.n_samples_per_prompt // config.train_batch_size * config.max_epochs
    frozen = step < config.freezing_actor_steps

    def rates(peak: float, first: int) -> list[float]:
        total, now = (iterations - first) * per_iteration, (step - first) * per_iteration
        return [learning_rate(now + k, total, peak, config.warmup_ratio, config.min_lr_ratio) for k in range(per_iteration)]

    actor_rates = [] if frozen else rates(config.actor_learning_rate, config.freezing_actor_steps)
    return Optimisation(config.train_batch_size, config.max_epochs, rates(config.critic_learning_rate, 0), actor_rates, f"{seed}-{step}")


def restore_controller(controller: KLController, coef: float) -> KLController:
    return FixedKL(coef) if isinstance(controller, FixedKL) else AdaptiveKL(coef, controller.target, controller.horizon)


def final_metrics(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over the last fifth of the iterations, and the reward's rise from the first fifth with its standard error."""
    fifth = max(1, len(lines) // 5)
    last, start = lines[-fifth:], lines[:fifth]
    names = [name for name in last[-1] if name not in ("step", "time")]
    metrics = {name: sum(line.get(name, last[-1][name]) for line in last) / len(last) for name in names}
    before, after = ([line["reward/mean"] for line in part] for part in (start, last))
    metrics["reward/first_fifth"], metrics["reward/last_fifth"] = sum(before) / len(before), sum(after) / len(after)
    metrics["reward/rise_standard_error"] = (_variance_of_mean(before) + _variance_of_mean(after)) ** 0.5
    return metrics | {"iterations": float(len(lines))}


def _variance_of_mean(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
