"""Runs an environment of a verifiers release before 0.2: `load_environment(NAME, **options)`."""

from __future__ import annotations

import contextvars
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .driver_errors import Problem, failure_of, recorded_failure
from .task_messages import messages_of

POLICY_SECONDS = 86400.0  # for one answer; alignflow applies its own limit
# the current episode's errors in reward functions, which rubrics log and count as 0
swallowed: contextvars.ContextVar[list[BaseException] | None] = contextvars.ContextVar(
    "swallowed", default=None
)


class SwallowedErrors(logging.Handler):
    """Keeps the error that a rubric reports while handling it."""

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        kept = swallowed.get()
        if error is not None and kept is not None and "reward function" in record.getMessage():
            kept.append(error)


class OldEnvironment:
    """Yields the environment's tasks, and runs the environment on one task."""

    is_endless = False  # its tasks are a data set

    def __init__(self, name: str, options: dict[str, Any]):
        import verifiers

        self._vf: Any = verifiers
        self._env = self._vf.load_environment(name.partition("@")[0], **options)

    def tasks(self, dataset: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of the data set `train` or `eval`."""
        rows = self._env.get_eval_dataset() if dataset == "eval" else self._env.get_dataset()
        for row in rows:
            yield {"task": row, "prompt": messages_of(row["prompt"]), "answer": row.get("answer")}

    async def serve(self, url: str, key_variable: str, serving: Callable[[], Awaitable[None]]) -> None:
        """Runs `serving`, within which episodes can be run. Raises Problem if the environment cannot be
        used."""
        if getattr(self._env, "requires_group_rollouts", False):
            raise Problem("its rubric compares the answers of a group, which alignflow cannot give it")
        if not hasattr(self._env, "run_rollout") or not hasattr(self._vf, "ClientConfig"):
            raise Problem("this release of verifiers is too old: install 0.1.14 or a later one")
        from verifiers.clients import resolve_client

        self._client = resolve_client(
            self._vf.ClientConfig(
                api_base_url=url, api_key_var=key_variable, max_retries=0, timeout=POLICY_SECONDS
            )
        )
        logging.getLogger("verifiers").addHandler(SwallowedErrors(logging.ERROR))
        await serving()

    async def run(self, task: dict[str, Any], model: str) -> dict[str, Any]:
        """Returns the reward and the metrics of one episode. Raises Failure if the episode has no reward."""
        errors = list[BaseException]()
        swallowed.set(errors)
        output = await self._env.run_rollout(task, self._client, model, {})
        if errors:
            raise failure_of(errors[0])
        if output.get("error"):
            raise recorded_failure(output["error"])
        return {"reward": output["reward"], "metrics": dict(output.get("metrics") or {})}
