"""Runs PPO's iterations in a loop: validates, logs, exports, and saves resume states. `iteration.py` runs one
iteration."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.config import PPO
from rlhf_core.objectives.kl_controller import KLController
from rlhf_core.rewards.combine import Running
from rlhf_core.runs import resume_state
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import EXPORTS, KEPT_FOLDER, ROLLOUTS, STATE, RunDir
from rlhf_core.runs.timeline import write_timeline
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.iteration import Carried, Iteration, ppo_iteration
from rlhf_core.stages.ppo.ppo_setup import schedule_of
from rlhf_core.stages.ppo.sampling.collector import Collected, Collector, start_collector
from rlhf_core.stages.ppo.sampling.curriculum_draws import CurriculumDraws
from rlhf_core.stages.ppo.sampling.group_filter import GroupFilter
from rlhf_core.stages.ppo.sampling.sampled_answers import Setup
from rlhf_core.stages.ppo.sampling.stored import (
    kept_iterations,
    read_ahead,
    read_collected,
    remove_kept,
    write_ahead,
    write_collected,
    write_kept,
)
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
    validate,
    write_rollouts,
)
from rlhf_core.stages.ppo.token_records import readable
from rlhf_core.system.files import link_tree, sync_to_disk
from rlhf_core.training.engine import at

REFERENCE = "reference"  # in the state folder and in states: the export that gave the reference its weights
SHOWN = (
    "reward/mean",
    "kl/mean",
    "policy/first_ratio",
    "response/length",
    "phase/generate",
    "phase/score",
    "phase/train",
)


class IterationLoop:
    """Runs the iterations of a stage, and holds the state that changes between them: KL controller, carried
    state, best iteration, and the resume state that is being written.

    `held_out` holds the validation prompts, or None if there are none. Call `begin`, then `run_iterations`.
    """

    def __init__(
        self,
        fleet: Fleet,
        setup: Setup,
        held_out: Validation | None,
        run: RunDir,
        iterations: int,
        seed: int,
    ):
        config = setup.config
        self.best: Best | None = None
        self._fleet = fleet
        self._setup = setup
        self._config = config
        self._held_out = held_out
        self._run = run
        self._iterations = iterations
        self._until = iterations if config.has_engines else kept_iterations(config, iterations)
        self._seed = seed
        self._first = 0
        self._kl = KLController(config.init_kl_coef, config.kl_target, config.kl_horizon)
        self._carried = Carried(0, {})
        self._named: tuple[int, ...] = ()  # best iterations named in the last two states
        self._commit: resume_state.StateCommit | None = None
        self._collector: Collector | None = None
        self._reference: Path | None = None  # the export whose weights the reference was reset to

    def begin(self, resume: resume_state.Resume | None) -> None:
        """Compares engines and trainer, loads the resume state, validates the starting model, and starts
        collecting answers, as configured."""
        fleet = self._fleet
        if self._config.has_engines:
            # before the first transfer; raises EngineDiffers
            found = fleet.probe(self._setup.probe, synced=False)
            told = f"differ by up to {found.gap:.2g} of {found.bound:.2g} allowed"
            print(f"log-probs of engines and trainer {told}", flush=True)
        if resume:
            self._load(resume)
        elif self._config.engine.adapters == "alone":
            fleet.engines.sync_weights()  # so that all answers are from engines with adapters
        for folder in (KEPT_FOLDER, ROLLOUTS):
            remove_kept(self._run / folder, self._first)
        if self._held_out and not resume:
            shutil.rmtree(self._run / BEST, ignore_errors=True)  # left by an attempt without a resume state
            _, self.best = validated(fleet, self._held_out, self._run, 0, None)
        if self._config.continuous and self._config.has_engines:
            known = read_collected(resume.folder, self._setup.order) if resume else Collected()
            updates = updates_before(self._config, self._first)
            group_filter = None
            if self._config.dynamic_filtering:
                group_filter = GroupFilter(fleet, self._setup, self._carried.statistics)
            self._collector = start_collector(
                fleet.engines, self._setup, self._iterations, self._first, updates, known, group_filter
            )

    def run_iterations(self) -> int:
        """Runs the remaining iterations, unless `stop_when` ends the run earlier, and waits for the last
        resume state. Returns the number of the last iteration."""
        config = self._config
        tracker = Tracker(self._run, self._iterations, self._first)
        print(
            f"iteration {self._first + 1} of {self._iterations} begins: its answers are sampled first",
            flush=True,
        )
        parameters = 0
        if not config.lora and config.has_engines:
            parameters = self._fleet.trained_parameters()
        cadence = resume_state.Cadence(
            config.save_steps, config.save_minutes, self._run.path, parameters, config.ema is not None
        )
        done = self._first
        while done < self._until:
            done += 1
            iteration = self._iterate(done)
            metrics = iteration.metrics
            if self._held_out and self._validates(done):
                metrics |= self._validate(self._held_out, done)
            if config.keeps_rollouts:
                answers = (iteration.rollouts, iteration.rewards, self._carried.statistics)
                write_kept(self._run / KEPT_FOLDER, done, self._setup, *answers)
            if done % config.logging_steps == 0 or done == self._until or REWARD in metrics:
                tracker.log(done, metrics, show=SHOWN)
                write_timeline(self._run.path, done, iteration.timeline)
                self._write_readable(done, iteration)
            # before saving the state, so that a run that resumes after this iteration does not export again
            if done in config.export_at:
                export(self._fleet, self._run / EXPORTS / f"iteration{done}")
            if self._stops():
                print(
                    f"stopped after iteration {done}: {config.stop_when} validations without a higher mean"
                    " reward",
                    flush=True,
                )
                break
            if self._resets_reference(done):
                self._reset_reference(done)
            if done < self._iterations and cadence.due(done):
                self._save(done, cadence)
        finish_saving(self._fleet, self._commit)
        tracker.close()
        if self._collector:
            self._collector.stop()  # after `stop_when`, collected answers are left that nothing will train on
        return done

    def _load(self, resume: resume_state.Resume) -> None:
        """Continues from a resume state."""
        fleet = self._fleet
        self._first = resume.step
        fleet.load_state(resume.folder)
        if self._config.has_engines:
            fleet.engines.sync_weights(updates_before(self._config, self._first))
            fleet.probe(self._setup.probe)
        self._kl, carried = restore(self._kl, resume.loop)
        if (resume.folder / REFERENCE).is_dir():
            self._reference = self._run / STATE / REFERENCE
            link_tree(resume.folder / REFERENCE, self._reference)
            fleet.reset_reference(self._reference)
        if self._setup.order.curriculum is not None:
            self._setup.order.curriculum.read(resume.folder)
        ahead = read_ahead(resume.folder, self._setup.order, self._setup.sampling.n)
        self._carried = carried._replace(ahead=ahead)
        if resume.loop.get("best"):
            self.best = Best(*resume.loop["best"])
            self._named = (self.best.iteration,)
        print(f"resumed after iteration {self._first} of {self._iterations}", flush=True)

    def _write_readable(self, done: int, iteration: Iteration) -> None:
        """Writes some answers of an iteration in readable form."""
        answers = (iteration.rollouts, iteration.rewards, iteration.records)
        rows = readable(*answers, self._fleet.decode, self._fleet.token_texts)
        write_rollouts(self._run / ROLLOUTS / f"iteration{done}.jsonl", rows)

    def _iterate(self, number: int) -> Iteration:
        """Runs iteration `number`, counted from 1, and stores the state that it passes to the next
        iteration."""
        step = number - 1
        last = number == self._iterations
        schedule = schedule_of(self._config, step, self._iterations, self._seed)
        if self._config.rollouts_only:
            schedule = schedule._replace(rates={})
        coef = self._kl.coef if self._kl.target else self._config.kl_coef_of(step, self._iterations)
        with at(f"iteration {number} of {self._iterations}"):
            iteration = ppo_iteration(
                self._fleet, self._setup, self._carried, coef, schedule, last, self._collector
            )
        self._carried = iteration.carried
        self._kl = adapted(self._kl, self._config, step, iteration.kl)
        return iteration

    def _validates(self, done: int) -> bool:
        """Returns whether the actor is validated after this iteration."""
        due = done % self._config.eval_steps == 0 and done > self._config.freezing_actor_steps
        return due or done == self._until

    def _validate(self, held_out: Validation, done: int) -> dict[str, float]:
        """Validates the actor. Keeps the exports of the best iteration and of the iterations that resume
        states name."""
        metrics, self.best = validated(self._fleet, held_out, self._run, done, self.best)
        keep_best(self._run, {self.best.iteration, *self._named})
        return metrics

    def _resets_reference(self, done: int) -> bool:
        """Returns whether the reference receives the actor's weights after this iteration."""
        every = self._config.reset_reference_every
        return every is not None and done % every == 0 and done < self._iterations

    def _reset_reference(self, done: int) -> None:
        """Copies the actor's weights to the reference through an export, to which later resume states
        link."""
        self._reference = self._run / STATE / REFERENCE
        export(self._fleet, self._reference)
        self._fleet.reset_reference(self._reference)
        print(f"the reference is the actor after iteration {done} of {self._iterations}", flush=True)

    def _stops(self) -> bool:
        """Returns whether `stop_when` ends the run."""
        limit = self._config.stop_when
        return self.best is not None and limit is not None and self.best.since >= limit

    def _save(self, done: int, cadence: resume_state.Cadence) -> None:
        """Writes a resume state as soon as the previous one is complete."""
        fleet = self._fleet
        state = iteration_state(self._kl, self._carried) | {
            "layout": resume_state.layout_of(self._config) | {"zero_stage": fleet.zero_stage},
            "best": self.best,
        }
        finish_saving(fleet, self._commit)
        curriculum = self._setup.order.curriculum
        write = partial(save_state, fleet, self._carried, self._collector, self._reference, curriculum)
        self._commit = resume_state.save(
            self._run, done, self._config.keep_checkpoints, state, write, fleet.state_files()
        )
        cadence.saved()
        if self.best:
            self._named = (*self._named[-1:], self.best.iteration)
            keep_best(self._run, self._named)


def validated(
    fleet: Fleet, held_out: Validation, run: RunDir, iteration: int, best: Best | None
) -> tuple[dict[str, float], Best]:
    """Validates the actor after an iteration, and exports it if it is the best so far. Returns the metrics
    and the best iteration."""
    start = time.monotonic()
    metrics = validate(fleet.engines, fleet, held_out, run, iteration)
    best = Best(iteration, metrics) if best is None else best.after(iteration, metrics)
    if best.iteration == iteration:
        export(fleet, run / BEST / f"iteration{iteration}")
        if fleet.engines.adapters_alone:  # engines that receive only adapters cannot load the export later
            best = best._replace(answered_again=answer_again(fleet.engines, fleet, held_out, run))
    interval = f" ({metrics[LOW]:.4g} to {metrics[HIGH]:.4g})" if LOW in metrics else ""
    print(f"iteration {iteration}: mean reward {metrics[REWARD]:.4g}{interval} on eval_prompts", flush=True)
    fleet.take_work()
    return metrics | {"phase/validate": time.monotonic() - start}, best


def chosen(fleet: Fleet, held_out: Validation, run: RunDir, best: Best, last: int) -> dict[str, float]:
    """Returns the metrics of the best iteration. Metrics named `eval/...` are of its answers with fresh
    seeds. Metrics named `selection/reward/...` decided the choice; they are biased upwards, because they are
    the largest of all validations. `last` is the iteration whose weights the engines have."""
    if best.answered_again is not None:
        metrics = best.answered_again
    elif best.iteration == last:
        metrics = answer_again(fleet.engines, fleet, held_out, run)
    else:
        checkpoint = run / BEST / f"iteration{best.iteration}"
        metrics = answer_as(fleet.engines, fleet, held_out, run, checkpoint)
    selection = {
        f"selection/{name.removeprefix('eval/')}": best.metrics[name]
        for name in (REWARD, LOW, HIGH)
        if name in best.metrics
    }
    return metrics | selection | {"eval/best_iteration": float(best.iteration)}


def save_state(
    fleet: Fleet,
    carried: Carried,
    collector: Collector | None,
    reference: Path | None,
    curriculum: CurriculumDraws | None,
    folder: Path,
) -> None:
    """Writes the roles' part of a resume state, answers that were sampled ahead, the curriculum's counts and
    draws, and links to the export `reference`."""
    fleet.save_state(folder)
    if reference is not None:
        link_tree(reference, folder / REFERENCE)
    first = carried.position
    if collector is not None:
        collected = collector.state()
        write_collected(folder, collected)
        first = min((collected.next, *collected.open, *collected.ready, *collected.dropped))
    if curriculum is not None:  # after the collector's state, so that no draw that it needs is missing
        curriculum.write(folder, first)
    if carried.ahead is not None:
        write_ahead(folder, carried.ahead)


def finish_saving(fleet: Fleet, commit: resume_state.StateCommit | None) -> None:
    """Waits until the last state is complete. Raises an error if saving failed."""
    if commit:
        fleet.finish_saving()
        commit.wait()


def updates_before(config: PPO, iteration: int) -> int:
    """Returns the number of earlier iterations that updated the actor."""
    return 0 if config.rollouts_only else max(0, iteration - config.freezing_actor_steps)


def adapted(kl: KLController, config: PPO, iteration: int, mean_kl: float) -> KLController:
    """Returns the KL controller after an iteration. It stays unchanged before the actor's first update,
    because training has not caused the KL."""
    if not updates_before(config, iteration):
        return kl
    return kl.update(mean_kl, config.rollout_batch_size * config.n_samples_per_prompt)


def export(fleet: Fleet, folder: Path) -> None:
    """Writes the actor as a model and flushes it to disk, because a resume state relies on it. Replaces the
    files of an interrupted attempt."""
    shutil.rmtree(folder, ignore_errors=True)
    fleet.export_actor(folder)
    sync_to_disk(folder)


def iteration_state(kl: KLController, carried: Carried) -> dict[str, Any]:
    """Returns the KL coefficient, prompt position and running reward statistics as a JSON object for the
    resume state."""
    return {
        "kl_coef": kl.coef,
        "position": carried.position,
        "statistics": {name: list(r) for name, r in carried.statistics.items()},
    }


def restore(kl: KLController, loop: Mapping[str, Any]) -> tuple[KLController, Carried]:
    """Returns the KL controller, prompt position and running reward statistics from a stored
    `iteration_state`."""
    return replace(kl, coef=loop["kl_coef"]), Carried(
        loop["position"], {name: Running(*values) for name, values in loop["statistics"].items()}
    )
