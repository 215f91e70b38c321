"""Samples the answers of a round with one engine in this process or several engines on a Ray cluster. Writes
each prompt's answers to disk at once.

A restarted stage samples only the missing answers: `state/answers.jsonl` has a line for each answered prompt.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config import Preferences
from rlhf_core.models.precision import dtype_of
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer, Sampling, answer_of
from rlhf_core.rollout.engine_kinds import open_engine
from rlhf_core.runs.run_dir import STATE, RunDir, StageRequest
from rlhf_core.system.files import write_text

PROGRESS_SECONDS = 15.0
SILENT_SECONDS = 3600.0  # limit for the answers to one prompt
Answered = tuple[int, list[SampledAnswer]]


def answers_of_round(
    config: Preferences,
    policy: str,
    prompts: Sequence[list[int]],
    stop_token_ids: Sequence[int],
    request: StageRequest,
    run: RunDir,
    pictures: Sequence[Pictures] = (),
) -> list[list[SampledAnswer]]:
    """Returns `n_samples_per_prompt` answers to each prompt, without log-probs. Seeds depend only on the run,
    the round and the prompt. `pictures` holds the images of each prompt, and is empty if no prompt has
    any."""
    file = run / STATE / "answers.jsonl"
    n = config.n_samples_per_prompt
    found = _kept(file, n)
    missing = [i for i in range(len(prompts)) if i not in found]
    print(
        f"sampling {n} answers to each of {len(prompts)} prompts"
        + (f", {len(found)} have theirs" if found else ""),
        flush=True,
    )
    if missing:
        seeds = [random.Random(f"{request.seed}-{config.first_prompt}-{i}").getrandbits(48) for i in missing]
        settings = {
            "seed": request.seed,
            "max_model_len": config.prompt_max_len + config.generate_max_len,
            "dtype": dtype_of(policy, config.dtype, request.trust_remote_code),
            "trust_remote_code": request.trust_remote_code,
            "pictures": any(pictures),
        }
        how = Sampling.of(config, n, stop_token_ids, logprobs=False)
        logged = time.monotonic()
        tokens = 0
        done = 0
        with (
            file.open("a") as out,
            closing(
                _sampled(
                    config,
                    policy,
                    settings,
                    [prompts[i] for i in missing],
                    seeds,
                    how,
                    [pictures[i] for i in missing] if pictures else [],
                )
            ) as answered,
        ):
            for place, group in answered:
                # Copied, because Ray's store has less space.
                found[missing[place]] = [answer_of(answer.tokens, [], answer.finished) for answer in group]
                out.write(
                    json.dumps([missing[place], [[list(answer.tokens), answer.finished] for answer in group]])
                    + "\n"
                )
                out.flush()
                tokens = tokens + sum(len(answer.tokens) for answer in group)
                done = done + 1
                if time.monotonic() - logged > PROGRESS_SECONDS:
                    logged = time.monotonic()
                    print(
                        f"sampled answers to {done} of {len(missing)} prompts, {tokens:,} tokens", flush=True
                    )
    return [found[i] for i in range(len(prompts))]


def _kept(file: Path, n: int) -> dict[int, list[SampledAnswer]]:
    """Returns the answers in the file, keyed by prompt, and removes incomplete lines from the file."""
    file.parent.mkdir(exist_ok=True)
    found: dict[int, list[SampledAnswer]] = {}
    lines = file.read_text().splitlines() if file.is_file() else []
    for line in lines:
        try:
            prompt, group = json.loads(line)
        except ValueError:
            continue
        if len(group) == n:
            found[prompt] = [answer_of(tokens, [], finished) for tokens, finished in group]
    if len(found) < len(lines):
        rows = [
            [prompt, [[list(answer.tokens), answer.finished] for answer in group]]
            for prompt, group in found.items()
        ]
        write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return found


def _sampled(
    config: Preferences,
    policy: str,
    settings: dict[str, Any],
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    how: Sampling,
    pictures: Sequence[Pictures],
) -> Generator[Answered, None, None]:
    """Yields answers from one engine in this process, or from the engines of a temporary Ray group, each on
    its own GPUs."""
    if config.engine.num_engines == config.engine.pipeline_parallel_size == 1:
        sampler = open_engine(policy, config.engine, **settings)
        try:
            yield from sampler.stream(
                prompts,
                seeds,
                how._replace(seed_whole=torch.cuda.is_available() and not config.engine.seed_answers),
                pictures,
            )
        finally:
            sampler.close()
        return
    from rlhf_core.cluster.temporary_group import temporary_group
    from rlhf_core.cluster.worker_group import put_on_nodes
    from rlhf_core.rollout.sampler_role import SamplerRole

    engines = config.engine
    prepare = ("rlhf_core.rollout.sampler_role:prepare", engines)
    parts = {"span": engines.processes, "pipeline_stages": engines.pipeline_parallel_size}
    with temporary_group(
        "sampler",
        engines,
        engines.start_timeout,
        SamplerRole,
        prepare,
        **parts,
        model=policy,
        config=engines,
        **settings,
    ) as group:
        print(f"{group.world_size} engines are up", flush=True)
        yield from group.stream(
            "generate",
            SILENT_SECONDS,
            SamplerRole.stream_share,
            put_on_nodes(list(prompts)),
            list(seeds),
            how,
            list(pictures),
        )
