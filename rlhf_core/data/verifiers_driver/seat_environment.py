"""Runs an environment of `verifiers.v1` (verifiers 0.2 and later): a taskset, and seats that harnesses
play."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .driver_errors import Failure, Problem, recorded_failure
from .task_messages import messages_of

HERE = {"type": "subprocess"}  # verifiers' own default is a cloud sandbox
PLAIN = {"id": "null"}  # a conversation with the taskset's tools


class SeatEnvironment:
    """Yields the environment's tasks, and runs the environment on one task.

    `options` are its `env` block without the taskset's ID. The policy plays the seat that has no client. If
    neither options, seat nor taskset name a harness, the seat is a plain conversation; without a runtime it
    runs on this machine. Raises Problem if the environment cannot be used.
    """

    def __init__(self, name: str, options: dict[str, Any]):
        import verifiers.v1
        from verifiers.v1.configs.agent import agent_config_fields

        self._vf: Any = verifiers.v1
        given = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
        seats = agent_config_fields(self._vf.resolve_env_config(given))
        trained = [seat for seat, config in seats.items() if config.client is None]
        if len(trained) != 1:
            raise Problem(
                f"the policy can play one seat, and these have no client: {', '.join(trained) or 'none'}; set"
                " options: {SEAT: {client: {...}}} for the others"
            )
        (self._seat,) = trained
        placed = {**given, self._seat: self._placed(given, seats[self._seat])}
        self._env = self._vf.load_environment(self._vf.resolve_env_config(placed))
        self._task_kind = type(self._env.taskset).task_type()

    def _placed(self, given: dict[str, Any], seat: Any) -> dict[str, Any]:
        """Returns the options of the trained seat with a harness and a runtime. Raises Problem for a harness
        that executes what the model writes, unless the options name a runtime."""
        from verifiers.v1.utils.loaders import default_harness_id, harness_class

        own = {**given.get(self._seat, {})}
        if seat.model is not None:
            raise Problem(f"the policy is the model of the seat {self._seat}: leave its model out of options")
        if "retries" in own:
            raise Problem(
                "failed attempts are repeated by max_attempts of environment: leave retries out of"
                f" options.{self._seat}"
            )
        # a retry in the same episode would also count the answers of the failed attempt
        if hasattr(seat, "retries"):
            own["retries"] = type(seat.retries)().model_dump(mode="json")
        harness = default_harness_id(given["taskset"]["id"]) if seat.harness is None else seat.harness.id
        if seat.harness is None and harness == "bash":
            own["harness"] = PLAIN
            harness = PLAIN["id"]
        if "runtime" in own or seat.runtime.type != "prime":
            return own
        if harness_class(harness).EXECUTES_CODE:
            raise Problem(
                f"the harness {harness} executes what the model writes: set options.{self._seat}.runtime to"
                " {type: docker}, or to {type: subprocess}, which is this machine with all your rights"
            )
        return {**own, "runtime": HERE}

    @property
    def is_endless(self) -> bool:
        """Returns whether the taskset declares that its tasks do not end."""
        taskset = self._env.taskset
        return not getattr(taskset, "bounded", not getattr(taskset, "INFINITE", False))

    def tasks(self, dataset: str) -> Iterator[dict[str, Any]]:
        """Yields the tasks of the taskset, as its options select them."""
        for task in self._env.taskset:
            data = task.data.model_dump(mode="json")
            system = task.data.system_prompt
            first = [{"role": "system", "content": system}] if system else []
            opening = data.get("prompt") or data.get("name") or f"task {data['idx']}"
            yield {"task": data, "prompt": [*first, *messages_of(opening)], "answer": data.get("answer")}

    async def serve(self, url: str, key_variable: str, serving: Callable[[], Awaitable[None]]) -> None:
        """Runs `serving`, within which episodes can be run."""
        self._client = self._vf.EvalClientConfig(base_url=url, api_key_var=key_variable)
        async with self._env.serving():
            await serving()

    async def run(self, task: dict[str, Any], model: str) -> dict[str, Any]:
        """Returns the reward and the metrics of one episode, as means over the runs of the trained seat.
        Raises Failure if the episode has no reward."""
        data = self._task_kind.data_type().model_validate(task)
        built = self._task_kind(data, self._env.config.taskset.task)
        episode = await self._env.run_episode(built, self._vf.ModelContext(model, self._client))
        if not episode.ok:
            failed = [trace for trace in episode.traces if trace.errors]
            errors = [*episode.errors, *(trace.errors[-1] for trace in failed)]
            raise recorded_failure(errors[-1]) if errors else Failure("verifiers reports no reason")
        # in some releases, the only seat of a plain taskset has its traces under another name
        own = [trace for trace in episode.traces if trace.agent.name == self._seat] or episode.traces
        for trace in own:
            if not trace.rewards or None in trace.rewards.values():
                raise Failure("its task gave no reward: it has no method marked @reward, or skipped one")
        names = {name for trace in own for name in trace.metrics}
        metrics = {name: [trace.metrics.get(name) or 0.0 for trace in own] for name in names}
        return {
            "reward": sum(trace.reward for trace in own) / len(own),
            "metrics": {name: sum(values) / len(own) for name, values in metrics.items()},
        }
