"""Loads prompts and models, trains with PPO, and writes the checkpoint. `ppo_stage.py` starts the processes
first; `iteration_loop.py` runs the iterations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedTokenizerBase

from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import PPO
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.config.training.optimiser_fields import EMA
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.data_report import JSON, write_data_report
from rlhf_core.data.documents import Prompt
from rlhf_core.data.prompt_rows import environment_sends, has_pictures
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.environments.environment_trial import try_environment
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.episodes_by_row import EpisodesByRow
from rlhf_core.environments.row_environments import ENVIRONMENT, require_environments
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.environments.verifiers.verifier_checks import require_verifiable
from rlhf_core.hub.vocabulary import require_same_vocabulary
from rlhf_core.models.picture_reading import require_images
from rlhf_core.rewards.judge.label_agreement import JUDGE_CACHE, agreement_metrics
from rlhf_core.rewards.own_tokens import OwnTokens, writers
from rlhf_core.rewards.reward_trial import try_rewards
from rlhf_core.rewards.row_teachers import require_teachers
from rlhf_core.rollout.dispatch import Background, Engines
from rlhf_core.runs import resume_state
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import EXPORTS, KEPT_FOLDER, ROLLOUTS, VALIDATION, Outcome, RunDir, StageRequest
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.iteration import step_means
from rlhf_core.stages.ppo.iteration_loop import IterationLoop, chosen, export
from rlhf_core.stages.ppo.ppo_setup import model_paths, setup_of, tell_schedule
from rlhf_core.stages.ppo.sampling.kept_answers import KeptAnswers
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.sampling.validation import BEST, REWARD, Best, load_validation
from rlhf_core.stages.ppo.start_fleet import start_fleet, wait_until_loaded
from rlhf_core.system.files import link_tree
from rlhf_core.training.ranks import EXPORT_TRIAL

if TYPE_CHECKING:
    from rlhf_core.rollout.engine_chat import EngineChat


def train(request: StageRequest, run: RunDir, groups: Mapping[str, WorkerGroup], begun: float) -> Outcome:
    """Trains the actor on its own samples and writes the output `checkpoint`. A killed run continues after
    its last saved iteration.

    `groups` holds the processes of each role. `begun` is when the stage began, on the monotonic clock.
    """
    config = cast(PPO, request.config)
    paths = model_paths(config, request.inputs)
    tokenizer, own_tokens = load_vocabularies(config, paths, request.trust_remote_code)
    renderer = Renderer(tokenizer, config.prompts.template, template_args=config.prompts.template_args)
    data = load_prompts(config.prompts, renderer, config.prompt_max_len, request.seed)
    write_data_report(run, request.name, prompts=data.report)
    iterations = config.iterations(len(data.items))
    tell_left_out(config, len(data.items))
    tell_schedule(config, iterations)
    setup = setup_of(config, data.items, paths, renderer.stop_token_ids, request.seed, data.sources)
    held_out = None
    if config.has_engines and not config.rollouts_only:
        held_out = load_validation(
            config, renderer, data.items, setup.terms, renderer.stop_token_ids, request.seed
        )
    resume = resume_state.latest(run)
    resumed_zero_stage = resume_state.kept_zero_stage(run, config)
    # Before any model is loaded, because functions and environment may be faulty.
    held_out_prompts = held_out.prompts if held_out else ()
    pictures = has_pictures(config, [*data.items, *held_out_prompts], own_tokens)
    require_images(config.image_encoder, pictures)
    if environment_sends(config):
        _ = renderer.pictures  # raises ValueError for a model that does not read images
    require_environments(config.environments, data.items, held_out_prompts)
    require_teachers(config.teachers, [prompt.row for prompt in data.items])
    agreement: dict[str, float] = {}
    judges: dict[str, EngineChat] = {}
    if config.has_engines:
        require_verifiable(config.reward, data.items, held_out_prompts)
        try_rewards(config.reward, data.items, renderer, held_out_prompts)
        judges = judges_of(config, paths, request, groups)
        agreement = agreement_metrics(
            config.reward,
            config.max_failed_rewards,
            run / JUDGE_CACHE,
            request.seed,
            lambda source: nullcontext(judges[source.title]),
        )
    engines = start_rollout_group(config, renderer, groups, [*data.items, *held_out_prompts])
    fleet = start_fleet(
        config,
        paths,
        tokenizer,
        request.seed,
        groups,
        engines,
        request.trust_remote_code,
        resumed_zero_stage,
        own_tokens,
        run / JUDGE_CACHE,
        judges,
        pictures,
    )
    with closing(fleet):
        print(f"all roles are up after {time.monotonic() - begun:.0f} s", flush=True)
        fleet.try_export(run / EXPORT_TRIAL)
        loop = IterationLoop(fleet, setup, held_out, run, iterations, request.seed)
        loop.begin(resume)
        last = loop.run_iterations()
        of_best = chosen(fleet, held_out, run, loop.best, last) if held_out and loop.best else {}
    write_checkpoint(fleet, run, loop.best, of_best)
    if config.ema is not None:
        fleet.export_average(run / EXPORTS / EMA)
    metrics = means_of_run(run) | of_best | agreement | data.report.metrics("data")
    return Outcome(metrics, outputs_of(config, validated=held_out is not None))


def load_vocabularies(
    config: PPO, paths: Mapping[str, str], trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, dict[str, OwnTokens]]:
    """Returns the actor's tokenizer, and the re-tokenisers for reward models with another tokenizer, by
    title. Raises ValueError if the model of any other role has a different vocabulary."""
    tokenizer = load_tokenizer(paths["actor"], trust_remote_code)
    others = [path for role, path in paths.items() if not role.startswith(("reward:", "judge:"))]
    require_same_vocabulary(paths["actor"], others, trust_remote_code)
    if config.teacher_top_k:  # the teacher's most probable tokens go to the actor
        for role, path in paths.items():
            if role == "reference" or role.startswith("teacher:"):
                require_same_vocabulary(path, [paths["actor"]], trust_remote_code)
    models = {source.title: paths[f"reward:{source.title}"] for source in config.reward_models}
    return tokenizer, writers(paths["actor"], models, trust_remote_code)


def judges_of(
    config: PPO, paths: Mapping[str, str], request: StageRequest, groups: Mapping[str, WorkerGroup]
) -> dict[str, EngineChat]:
    """Starts the judges that have engines of their own (see `start_judges`), and returns the chat with each
    judge by title; empty if there are no such judges."""
    if not config.own_judges:
        return {}
    from rlhf_core.stages.ppo.roles.judge_roles import start_judges  # the import takes a second

    wait = partial(wait_until_loaded, paths=paths, timeout=config.timeout)
    trust = request.trust_remote_code
    return start_judges(config, paths, request.seed, groups, trust, lambda loading: wait([loading]))


def tell_left_out(config: PPO, prompts: int) -> None:
    """Prints how many prompts each episode (pass over the prompts) leaves out, if any."""
    left = prompts % config.rollout_batch_size
    if left and config.curriculum is None:
        batch = f"{config.rollout_batch_size} (rollout_batch_size)"
        print(
            f"each episode leaves out {left} of {prompts} prompts, which fill no iteration of {batch}",
            flush=True,
        )


def start_rollout_group(
    config: PPO, renderer: Renderer, groups: Mapping[str, WorkerGroup], prompts: Sequence[Prompt]
) -> RolloutGroup:
    """Returns the engines, whose models are not loaded yet. If needed, starts the dispatcher for single
    answers and the processes of each environment. Tries each environment with its first prompt. Raises
    ValueError if an environment cannot be created or its code is wrong."""
    if config.train_only is not None:
        return KeptAnswers(config, groups["actor"], groups["actor"], folder=Path(config.train_only))
    engines = RolloutGroup(config, groups["sampler"], groups["actor"])
    if not config.talks_to and not config.continuous:
        return engines
    background = Background()
    dispatch = Engines(engines.sampler, config.timeout)
    engines = replace(engines, background=background, dispatch=dispatch)

    def started(environment: Environment, prompt: Prompt) -> Episodes:
        limits = Limits(
            environment.max_turns, config.prompt_max_len, config.generate_max_len, environment.answer_max_len
        )
        episodes = Episodes(environment, renderer, limits, background, dispatch)
        try_environment(environment, episodes, background, prompt, renderer)
        return episodes

    if config.environment is not None:
        return replace(engines, episodes=started(config.environment, prompts[0]))
    first = {prompt.row[ENVIRONMENT]: prompt for prompt in reversed(prompts) if config.environments}
    members = {name: started(config.environments[name], prompt) for name, prompt in first.items()}
    return replace(engines, episodes=EpisodesByRow(members)) if members else engines


def write_checkpoint(fleet: Fleet, run: RunDir, best: Best | None, of_best: Mapping[str, float]) -> None:
    """Writes the output `checkpoint`: the best iteration's export, or the actor if there were no validations.
    `of_best` holds the metrics of `chosen`."""
    if best:
        link_tree(run / BEST / f"iteration{best.iteration}", run / "checkpoint")
        told = f"mean reward {of_best[REWARD]:.4g} on eval_prompts, answered once more"
        print(f"the checkpoint is that of iteration {best.iteration}, {told}", flush=True)
    else:
        export(fleet, run / "checkpoint")


def outputs_of(config: PPO, validated: bool) -> dict[str, str]:
    """Returns the stage's outputs. `validated` says whether there were validations."""
    outputs = {"checkpoint": "checkpoint", "data_report": JSON, ROLLOUTS: ROLLOUTS}
    if config.keeps_rollouts:
        outputs[KEPT_FOLDER] = KEPT_FOLDER
    if config.exports:
        outputs[EXPORTS] = EXPORTS
    if validated:
        outputs[VALIDATION] = VALIDATION
    return outputs


def means_of_run(run: RunDir) -> dict[str, float]:
    """Returns the run's `final_metrics`, without validation metrics."""
    metrics = final_metrics(read_metrics(run.path))
    return {name: value for name, value in metrics.items() if not name.startswith("eval/")}


def final_metrics(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns each metric's mean over the last fifth of the logged iterations, skipping iterations that do
    not report it. Adds the reward's means over the first and the last fifth, the standard error of their
    difference, and the number of iterations."""
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
