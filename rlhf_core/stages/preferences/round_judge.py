"""Starts the engines of a round's judge on a Ray cluster, while no other part of the stage uses the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rlhf_core.config import Preferences
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.runs.run_dir import StageRequest
from rlhf_core.system.gpu_allocator import free_unused

if TYPE_CHECKING:
    from rlhf_core.cluster.worker_group import WorkerGroup
    from rlhf_core.judging.chat_client import Chat

SILENT_SECONDS = 3600.0  # limit for any part of a reply


@contextmanager
def round_judge(config: Preferences, request: StageRequest, source: JudgeReward) -> Iterator[Chat]:
    """Yields the chat client of a judge that runs on its own engines. The engines start with the first
    request and stop when the block ends. A judge whose verdicts are all cached starts no engines. Raises
    ValueError for a model that cannot judge."""
    # slow imports: Ray and another library
    from rlhf_core.cluster.temporary_group import temporary_group
    from rlhf_core.rollout.chat_models import judge_setup
    from rlhf_core.rollout.engine_chat import EngineChat
    from rlhf_core.rollout.sampler_role import SamplerRole

    judge = next(own for own in config.own_judges if own.title == source.title)
    engine = judge.model.engine
    path = request.inputs[judge.model.model]
    setup = judge_setup(
        f"the judge {judge.title}", path, judge.model, request.seed, request.trust_remote_code
    )
    with ExitStack() as stack:

        def start() -> WorkerGroup:
            free_unused()
            group = stack.enter_context(
                temporary_group(
                    judge.group,
                    engine,
                    engine.start_timeout,
                    SamplerRole,
                    ("rlhf_core.rollout.sampler_role:prepare", engine),
                    span=engine.processes,
                    pipeline_stages=engine.pipeline_parallel_size,
                    **setup.options,
                )
            )
            print(f"the judge {judge.title} is up on {group.world_size} engines", flush=True)
            return group

        chat = EngineChat(setup, start, SILENT_SECONDS)
        try:
            yield chat
        finally:
            chat.stop()
