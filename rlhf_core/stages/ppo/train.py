"""Runs all PPO iterations, saves resume states and exports the checkpoint. `ppo_stage.py` starts the
processes first."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import PPO
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import JSON, write_data_report
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.environments.environment_trial import try_environment
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectory import Limits
from rlhf_core.forecast.zero_stage import layout_of
from rlhf_core.hub.vocabulary import require_same_vocabulary
from rlhf_core.objectives.kl_controller import KLController
from rlhf_core.rewards.combine import Running, term_of
from rlhf_core.rewards.own_tokens import writers
from rlhf_core.rewards.reward_trial import try_rewards
from rlhf_core.rollout.dispatch import Background, Engines
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.runs import resume_state
from rlhf_core.runs.metrics_log import Tracker, read_metrics
from rlhf_core.runs.run_dir import EXPORTS, ROLLOUTS, VALIDATION, Outcome, RunDir, StageRequest
from rlhf_core.stages.ppo.fleet import Asking, Fleet
from rlhf_core.stages.ppo.iteration import Carried, IterationSchedule, ppo_iteration, step_means
from rlhf_core.stages.ppo.rollout_records import shown
from rlhf_core.stages.ppo.sampling.collector import Collector, answering
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Setup
from rlhf_core.stages.ppo.sampling.stored import read_ahead, read_collected, write_ahead, write_collected
from rlhf_core.stages.ppo.sampling.validation import (
    BEST,
    HIGH,
    LOW,
    REWARD,
    Best,
    Validation,
    answer_again,
    answer_as,
    keep_best,
    load_validation,
    validate,
    write_rollouts,
)
from rlhf_core.stages.ppo.start_fleet import start_fleet
from rlhf_core.system.files import link_tree, sync_to_disk
from rlhf_core.training.engine import at, learning_rate
from rlhf_core.training.ranks import EXPORT_TRIAL

PROBE_DOCUMENTS = 4
PROBE_TOKENS = 128
KEPT_ROLLOUTS = 8  # of each logged iteration
SHOWN = (
    "reward/mean",
    "kl/mean",
    "policy/first_ratio",
    "response/length",
    "phase/generate",
    "phase/score",
    "phase/train",
)


def train(request: StageRequest, run: RunDir, groups: Mapping[str, WorkerGroup], begun: float) -> Outcome:
    """Trains the actor on its own samples; the output is `checkpoint`. A killed run continues after its last
    saved iteration.

    `groups`: the processes of each role. `begun`: when the stage began, on the monotonic clock.
    """
    config = cast(PPO, request.config)
    paths = model_paths(config, request.inputs)
    tokenizer = load_tokenizer(paths["actor"], request.trust_remote_code)
    others = [path for role, path in paths.items() if not role.startswith("reward:")]
    require_same_vocabulary(paths["actor"], others, request.trust_remote_code)
    models = {source.title: paths[f"reward:{source.title}"] for source in config.reward_models}
    own_tokens = writers(paths["actor"], models, request.trust_remote_code)
    renderer = Renderer(tokenizer, config.prompts.template)
    data = load_prompts(config.prompts, renderer, config.prompt_max_len, request.seed)
    write_data_report(run, request.name, prompts=data.report)
    iterations = config.iterations(len(data.items))
    left = len(data.items) % config.rollout_batch_size
    if left:
        batch = f"{config.rollout_batch_size} (rollout_batch_size)"
        print(
            f"each episode leaves out {left} of {len(data.items)} prompts, which fill no iteration of"
            f" {batch}",
            flush=True,
        )
    setup = setup_of(config, data.items, paths, renderer.stop_token_ids, request.seed)
    held_out = load_validation(
        config, renderer, data.items, setup.terms, renderer.stop_token_ids, request.seed
    )
    resume = resume_state.latest(run)
    resumed_zero_stage = resume_state.kept_zero_stage(run, layout_of(config))
    # Before any model is loaded: functions and environment may be faulty.
    try_rewards(config.reward, data.items[0], renderer)
    asked = start_asking(config, renderer, groups, data.items[0])
    fleet = start_fleet(
        config,
        paths,
        tokenizer,
        request.seed,
        groups,
        request.trust_remote_code,
        resumed_zero_stage,
        own_tokens,
        asked,
    )
    with closing(fleet):
        print(f"all roles are up after {time.monotonic() - begun:.0f} s", flush=True)
        fleet.try_export(run / EXPORT_TRIAL)

        first = resume.step if resume else 0
        kl = KLController(config.init_kl_coef, config.kl_target, config.kl_horizon)
        carried = Carried(0, {})
        best = None
        # best iterations of the last two states
        named = (resume.loop["best"][0],) if resume and resume.loop.get("best") else ()
        commit: resume_state.StateCommit | None = None
        found = fleet.probe(setup.probe, synced=False)  # before the first transfer; raises EngineDiffers
        print(
            f"log-probs of engines and trainer differ by up to {found.gap:.2g} of {found.bound:.2g} allowed",
            flush=True,
        )
        if resume:
            fleet.load_state(resume.folder)
            fleet.sync_weights(updates_before(config, first))
            fleet.probe(setup.probe)
            kl, carried = restore(kl, resume.loop)
            carried = carried._replace(ahead=read_ahead(resume.folder, setup.order, setup.sampling.n))
            best = Best(*resume.loop["best"]) if resume.loop.get("best") else None
            print(f"resumed after iteration {first} of {iterations}", flush=True)
        elif config.engine.adapters == "alone":
            fleet.sync_weights()  # all answers come from engines with adapters; no effect yet
        if held_out and not resume:
            shutil.rmtree(run / BEST, ignore_errors=True)  # from an attempt without a resume state
            _, best = validated(fleet, held_out, run, 0, None)
        collector = (
            start_collector(fleet, setup, iterations, first, resume.folder if resume else None)
            if config.continuous
            else None
        )
        tracker = Tracker(run, iterations, first)
        print(f"iteration {first + 1} of {iterations} begins: its answers are sampled first", flush=True)
        cadence = resume_state.Cadence(
            config.save_steps, config.save_minutes, run.path, 0 if config.lora else fleet.trained_parameters()
        )
        for step in range(first, iterations):
            done = step + 1
            schedule = schedule_of(config, step, iterations, request.seed)
            with at(f"iteration {done} of {iterations}"):
                made = ppo_iteration(fleet, setup, carried, kl.coef, schedule, done == iterations, collector)
                metrics, mean_kl, carried, rollouts, rewards = made
            kl = adapted(kl, config, step, mean_kl)
            if held_out and (
                (done % config.eval_steps == 0 and done > config.freezing_actor_steps) or done == iterations
            ):
                validation, best = validated(fleet, held_out, run, done, best)
                metrics |= validation
                keep_best(run, {best.iteration, *named})
            stopped = best is not None and config.stop_when is not None and best.since >= config.stop_when
            if done % config.logging_steps == 0 or done == iterations or REWARD in metrics:
                tracker.log(done, metrics, show=SHOWN)
                write_rollouts(
                    run / ROLLOUTS / f"iteration{done}.jsonl",
                    islice(shown(rollouts, rewards, fleet.decode), KEPT_ROLLOUTS),
                )
            # before saving the state: a run that resumes after this iteration does not export again
            if done in config.export_at:
                export(fleet, run / EXPORTS / f"iteration{done}")
            if stopped:
                print(
                    f"stopped after iteration {done}: {config.stop_when} validations without a higher mean"
                    " reward",
                    flush=True,
                )
                break
            if done < iterations and cadence.due(done):
                state = iteration_state(kl, carried) | {
                    "layout": layout_of(config) | {"zero_stage": fleet.zero_stage},
                    "best": best,
                }
                finish_saving(fleet, commit)
                write = partial(save_state, fleet, carried, collector)
                commit = resume_state.save(
                    run, done, config.keep_checkpoints, state, write, fleet.state_files()
                )
                cadence.saved()
                if best:
                    named = (*named[-1:], best.iteration)
                    keep_best(run, named)
        finish_saving(fleet, commit)
        tracker.close()
        if collector:
            collector.stop()  # after `stop_when` there are answers on which nothing will train
        of_best = chosen(fleet, held_out, run, best, done) if held_out and best else {}
    if best:
        link_tree(run / BEST / f"iteration{best.iteration}", run / "checkpoint")
        told = f"mean reward {of_best[REWARD]:.4g} on eval_prompts, answered once more"
        print(f"the checkpoint is that of iteration {best.iteration}, {told}", flush=True)
    else:
        export(fleet, run / "checkpoint")
    outputs = {"checkpoint": "checkpoint", "data_report": JSON, ROLLOUTS: ROLLOUTS} | (
        {EXPORTS: EXPORTS} if config.export_at else {}
    )
    outputs |= {VALIDATION: VALIDATION} if held_out else {}
    means = {
        name: value
        for name, value in final_metrics(read_metrics(run.path)).items()
        if not name.startswith("eval/")
    }
    return Outcome(means | of_best | data.report.metrics("data"), outputs)


def validated(
    fleet: Fleet, held_out: Validation, run: RunDir, iteration: int, best: Best | None
) -> tuple[dict[str, float], Best]:
    """Validates the actor after an iteration, and exports it if it is the best so far. Returns metrics and
    the best iteration."""
    start = time.monotonic()
    metrics = validate(fleet, held_out, run, iteration)
    best = Best(iteration, metrics) if best is None else best.after(iteration, metrics)
    if best.iteration == iteration:
        export(fleet, run / BEST / f"iteration{iteration}")
        if fleet.adapters_alone:  # engines that get only adapters cannot load it later
            best = best._replace(answered_again=answer_again(fleet, held_out, run))
    interval = f" ({metrics[LOW]:.4g} to {metrics[HIGH]:.4g})" if LOW in metrics else ""
    print(f"iteration {iteration}: mean reward {metrics[REWARD]:.4g}{interval} on eval_prompts", flush=True)
    fleet.forget_seconds()
    return metrics | {"phase/validate": time.monotonic() - start}, best


def chosen(fleet: Fleet, held_out: Validation, run: RunDir, best: Best, last: int) -> dict[str, float]:
    """Returns the metrics of the best iteration: those of its answers with fresh seeds as `eval/...`, and
    those it was chosen by as `selection/reward/...`, which are biased upwards because they are the largest of
    all validations. `last`: the iteration whose weights the engines have."""
    if best.answered_again is not None:
        metrics = best.answered_again
    elif best.iteration == last:
        metrics = answer_again(fleet, held_out, run)
    else:
        metrics = answer_as(fleet, held_out, run, run / BEST / f"iteration{best.iteration}")
    selection = {
        f"selection/{name.removeprefix('eval/')}": best.metrics[name]
        for name in (REWARD, LOW, HIGH)
        if name in best.metrics
    }
    return metrics | selection | {"eval/best_iteration": float(best.iteration)}


def save_state(fleet: Fleet, carried: Carried, collector: Collector | None, folder: Path) -> None:
    """Writes the roles' part of a resume state, and the answers that were sampled ahead."""
    fleet.save_state(folder)
    if collector is not None:
        write_collected(folder, collector.state())
    if carried.ahead is not None:
        write_ahead(folder, carried.ahead)


def finish_saving(fleet: Fleet, commit: resume_state.StateCommit | None) -> None:
    """Waits until the last state is complete. Raises the error if saving failed."""
    if commit:
        fleet.finish_saving()
        commit.wait()


def start_asking(
    config: PPO, renderer: Renderer, groups: Mapping[str, WorkerGroup], prompt: Prompt
) -> Asking:
    """Starts the objects that request single answers from engines, if needed, and the processes of the
    environment, which is tried with `prompt`. Raises ValueError when it cannot be created or its code is
    wrong."""
    if config.environment is None and not config.continuous:
        return Asking()
    background = Background()
    engines = Engines(groups["sampler"], config.timeout)
    if config.environment is None:
        return Asking(background, engines)
    limits = Limits(
        config.environment.max_turns,
        config.prompt_max_len,
        config.generate_max_len,
        config.environment.answer_max_len,
    )
    episodes = Episodes(config.environment, renderer, limits, background, engines)
    try_environment(config.environment, episodes, background, prompt, renderer)
    return Asking(background, engines, episodes)


def updates_before(config: PPO, iteration: int) -> int:
    """Returns how often the actor was updated before an iteration."""
    return max(0, iteration - config.freezing_actor_steps)


def adapted(kl: KLController, config: PPO, iteration: int, mean_kl: float) -> KLController:
    """Returns the KL controller after an iteration. Before the actor's first update it is unchanged, because
    training has not caused the KL."""
    if not updates_before(config, iteration):
        return kl
    return kl.update(mean_kl, config.rollout_batch_size * config.n_samples_per_prompt)


def start_collector(fleet: Fleet, setup: Setup, iterations: int, first: int, state: Path | None) -> Collector:
    """Starts to collect answers for the iterations from `first` on. `state`: the folder of a resume state."""
    assert fleet.background is not None and fleet.engines is not None
    known = read_collected(state, setup.order) if state else None
    updates = updates_before(setup.config, first)
    answer = answering(fleet, setup.sampling)
    staleness = setup.config.max_staleness
    return Collector(
        fleet.background,
        answer,
        setup.order,
        staleness,
        iterations,
        first,
        updates,
        known,
        fleet.engines.died,
    )


def export(fleet: Fleet, folder: Path) -> None:
    """Writes the actor as a model and syncs it to disk, because a resume state relies on it. Replaces
    leftovers of an interrupted attempt."""
    shutil.rmtree(folder, ignore_errors=True)
    fleet.export_actor(folder)
    sync_to_disk(folder)


def model_paths(config: PPO, inputs: Mapping[str, str]) -> dict[str, str]:
    """Returns the path of each role's model. By default the critic starts from the first reward model, and
    the reference is the actor's starting model."""
    names = {"actor": config.actor} | (
        {"reference": config.reference or config.actor} if "reference" in config.groups else {}
    )
    names |= {f"reward:{source.title}": source.model for source in config.reward_models}
    if config.has_critic:
        names["critic"] = config.critic or config.reward_models[0].model
    return {role: inputs[name] for role, name in names.items()}


def setup_of(
    config: PPO, prompts: Sequence[Prompt], paths: Mapping[str, str], stop_token_ids: Sequence[int], seed: int
) -> Setup:
    """Returns the values that are fixed for all iterations."""
    n = config.n_samples_per_prompt
    normalize: Literal["none", "stored"] = "stored" if config.normalize_reward else "none"
    terms = [term_of(source, paths.get(f"reward:{source.title}"), normalize) for source in config.reward]
    probe = [
        Document(p.tokens[-PROBE_TOKENS:], [True] * len(p.tokens[-PROBE_TOKENS:]))
        for p in prompts[:PROBE_DOCUMENTS]
    ]
    return Setup(
        config=config,
        order=PromptOrder(prompts, config.rollout_batch_size, seed),
        sampling=Sampling.of(config, n, stop_token_ids),
        terms=terms,
        probe=probe,
        allowed_failures=int(config.max_failed_rewards * config.rollout_batch_size * n),
    )


def schedule_of(config: PPO, step: int, iterations: int, seed: int) -> IterationSchedule:
    """Returns batches and learning rates of one iteration. The actor does not train in the first
    `freezing_actor_steps` iterations."""
    per_epoch = config.rollout_batch_size * config.n_samples_per_prompt // config.train_batch_size
    per_iteration = per_epoch * config.max_epochs
    frozen = config.freezing_actor_steps

    def rates(peak: float, first: int) -> list[float]:
        total = (iterations - first) * per_iteration
        now = (step - first) * per_iteration
        return [
            learning_rate(now + k, total, peak, config.warmup_ratio, config.min_lr_ratio)
            for k in range(per_iteration)
        ]

    by_role = {"critic": rates(config.critic_learning_rate, 0)} if config.has_critic else {}
    by_role |= {"actor": rates(config.actor_learning_rate, frozen)} if step >= frozen else {}
    return IterationSchedule(per_epoch, config.max_epochs, by_role, f"{seed}-{step}")


def iteration_state(kl: KLController, carried: Carried) -> dict[str, Any]:
    """Returns KL coefficient, prompt position and running reward statistics as a JSON object for the resume
    state."""
    return {
        "kl_coef": kl.coef,
        "position": carried.position,
        "statistics": {name: list(r) for name, r in carried.statistics.items()},
    }


def restore(kl: KLController, loop: Mapping[str, Any]) -> tuple[KLController, Carried]:
    """Returns KL controller, prompt position and running reward statistics from a stored
    `iteration_state`."""
    return replace(kl, coef=loop["kl_coef"]), Carried(
        loop["position"], {name: Running(*values) for name, values in loop["statistics"].items()}
    )


def final_metrics(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Computes each metric's mean over those of the last fifth of the logged iterations that report it, and
    the reward's means in the first and last fifth with the standard error of the rise."""
    fifth = max(1, len(lines) // 5)
    last = lines[-fifth:]
    start = lines[:fifth]
    means = step_means(last)
    metrics = {name: value for name, value in means.items() if name not in ("step", "time")}
    before, after = ([line["reward/mean"] for line in part] for part in (start, last))
    metrics["reward/first_fifth"] = sum(before) / len(before)
    metrics["reward/last_fifth"] = sum(after) / len(after)
    metrics["reward/rise_standard_error"] = (_variance_of_mean(before) + _variance_of_mean(after)) ** 0.5
    return metrics | {"iterations": float(lines[-1]["step"])}


def _variance_of_mean(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
