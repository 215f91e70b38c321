"""Configures where rewards come from: reward models, Python functions, HTTP servers, verifiers, judges.
Torch-free. Also parses a recipe's shorthands:

reward: reward_model                          one reward model: a stage, a folder or a Hub id
reward: [reward_model, checks.py:short, "http://localhost:8000"]
reward: [{model: reward_model, weight: 0.5}, {function: "checks.py:short", normalize: running}]
reward: {judge: {model: NAME}, rubric: TEXT}  a chat model that rates each answer
reward: math                                  a verifier (config/rewarding/verifiers.py)
reward: environment                           the environment that ppo names
reward: none                                  ppo learns from the KL to a teacher alone
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewarding.verifiers import CodeReward, MathReward, ReasoningGymReward
from rlhf_core.config.rewarding.weighed_reward import StandardisedReward, WeighedReward
from rlhf_core.records import RECIPE_ONLY, Config, NotInDigest, Positive, Ranks, Rate, Variable, check


class RequestedReward(StandardisedReward):
    """Fields that functions and servers share. Requests are retried with growing pauses, up to a limit."""

    batch_size: Positive = Field(64, description="answers of one request")
    concurrency: Annotated[Positive, NotInDigest] = Field(
        1, description="requests at once (processes of a function)"
    )
    timeout: Annotated[Rate, NotInDigest] = Field(60.0, description="seconds one request may take")
    max_attempts: Annotated[Positive, NotInDigest] = Field(
        6,
        description=(
            "requests for one answer before it goes without a reward; a batch is given up after as"
            " many in a row without success, beyond those of a search for one answer"
        ),
    )


class ModelReward(WeighedReward):
    """A reward model on its own Ray group."""

    kind: Literal["model"] = "model"
    model: str = Field("reward_model", description="reward model")
    normalize: Literal["none", "stored", "running", "group"] | None = Field(
        None,
        description=(
            "stored: by the mean and std kept with the model; running: by those of all scores so far (in a"
            " round: of the round's own); group: by those of the answers to the same prompt (GDPO); default:"
            " stored if ppo sets normalize_reward, else none"
        ),
    )
    ranks: Annotated[Ranks | None, NotInDigest] = Field(
        None, description="its processes in ppo; default: reward_ranks of the stage"
    )

    @property
    def title(self) -> str:
        return self.name or re.sub(r"[^\w.:-]", "_", self.model.rstrip("/").rpartition("/")[2])


class FunctionReward(RequestedReward):
    """A Python function that runs in its own processes. Its parameters are any of `prompts`, `responses`,
    `rows`, `finished`, `query`."""

    kind: Literal["function"] = "function"
    function: str = Field(description="path.py:function", pattern=r"\.py:[A-Za-z_]\w*$")

    @property
    def file(self) -> Path:
        return Path(self.function.rpartition(":")[0]).absolute()

    @property
    def function_name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def title(self) -> str:
        return self.name or self.function_name


class HttpReward(RequestedReward):
    """A reward server: it receives the same lists as JSON by POST and returns `{"rewards": [...]}`.
    `alignflow serve-reward` is one."""

    kind: Literal["http"] = "http"
    url: str = Field(description="address", pattern=r"^https?://[^/]")
    api_key_env: Annotated[Variable | None, NotInDigest] = Field(
        None, description="environment variable whose value is sent as a bearer token"
    )

    @property
    def title(self) -> str:
        return self.name or re.sub(r"[^\w.:-]", "_", urlsplit(self.url).netloc)

    @field_validator("url")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if "@" in urlsplit(value).netloc:
            raise ValueError(
                "the address holds a password, which would end up in files: put a key into the variable"
                " api_key_env names"
            )
        return value


class EnvironmentReward(WeighedReward):
    """The reward from ppo's environment, summed over all answers of an episode."""

    kind: Literal["environment"] = "environment"
    normalize: Literal["none", "running", "group"] = Field(
        "none",
        description=(
            "running: standardise with the mean and std of all rewards so far; group: of the answers to the"
            " same prompt (GDPO)"
        ),
    )

    @property
    def title(self) -> str:
        return self.name or "environment"


class NoReward(WeighedReward):
    """No reward: the policy learns only from the KL to a teacher, which ppo names as its reference."""

    kind: Literal["none"] = "none"
    normalize: Literal["none"] = "none"

    @property
    def title(self) -> str:
        return self.name or "none"


IN_PLACE_OF_PATH = {"agent": "agent", "mcp": "mcp_tools"}
AGENT_FUNCTION = re.compile(r"\S+\.py:[A-Za-z_]\w*")
# alignflow's environments and their class in shipped/NAME.py
SHIPPED = {"guess": "Guess", "tools": "Tools", "agent": "Agent", "mcp_tools": "McpTools"}


class Environment(Config):
    """The environment that the policy talks to over several turns. The short form `environment:
    path.py:Class` means `{path: path.py:Class}`."""

    path: str = Field(description="path.py:Class of your own, or guess or tools; left out with agent or mcp")
    agent: str | None = Field(
        None,
        description=(
            "path.py:function, or a command: an agent that asks the policy through an OpenAI-compatible"
            " endpoint"
        ),
        json_schema_extra=RECIPE_ONLY,
    )
    mcp: tuple[str, ...] = Field(
        (),
        description="addresses or commands of MCP servers, whose tools the model may call",
        json_schema_extra=RECIPE_ONLY,
    )
    checker: str | None = Field(
        None,
        description=(
            "path.py:function that returns the reward: of an agent's result (default: the result is the"
            " reward), or of the last answer with mcp (default: 1 if it equals the row's answer)"
        ),
        json_schema_extra=RECIPE_ONLY,
        pattern=r"^\S+\.py:[A-Za-z_]\w*$",
    )
    options: dict[str, Any] = Field({}, description="arguments of the class, or of the agent's function")
    max_turns: Positive = Field(8, description="answers of an episode")
    answer_max_len: Positive | None = Field(
        None,
        description=(
            "tokens of one answer; default: what is left of generate_max_len, which all tokens after the"
            " prompt share"
        ),
    )
    timeout: Annotated[Rate, NotInDigest] = Field(
        60.0,
        description=(
            "seconds that the environment itself may take in an episode, without the time of the model"
        ),
    )
    max_attempts: Annotated[Positive, NotInDigest] = Field(
        3, description="attempts at an episode before it goes without a reward"
    )
    processes: Annotated[Positive, NotInDigest] = Field(1, description="processes that run episodes")
    concurrency: Annotated[Positive, NotInDigest] = Field(1024, description="episodes of one process at once")
    sandbox: Annotated[Literal["bubblewrap", "none"], NotInDigest] = Field(
        "bubblewrap",
        description="where tools run programs: closed in by bubblewrap, or (none) with all your rights",
        json_schema_extra=RECIPE_ONLY,
    )

    @field_validator("path")
    @classmethod
    def _named(cls, path: str) -> str:
        if path not in SHIPPED and not re.search(r"\.py:[A-Za-z_]\w*$", path):
            raise ValueError(
                f"{path!r} is no environment: name a class as path.py:Class, or one of {', '.join(SHIPPED)}"
            )
        return path

    @model_validator(mode="before")
    @classmethod
    def _of_agent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for field, path in IN_PLACE_OF_PATH.items():
            if given.get(field):
                given = {"path": path, **given}
        if isinstance(given.get("mcp"), str):
            given = {**given, "mcp": (given["mcp"],)}
        return given

    @check
    def _check_agent(self) -> Iterator[str]:
        for field, path in IN_PLACE_OF_PATH.items():
            if (self.path == path) != bool(getattr(self, field)):
                yield f"{field} stands in place of path: leave path out, or set {field} alone"
        if self.checker is not None and self.path not in IN_PLACE_OF_PATH.values():
            yield "checker is for agent and mcp: leave it out, or set one of them in place of path"
        for server in self.mcp:
            if "@" in (urlsplit(server).netloc if "://" in server else ""):
                yield "an address in mcp holds a password: name its variable in options.token_env"
        if self.agent is None or AGENT_FUNCTION.fullmatch(self.agent):
            return
        try:
            words = shlex.split(self.agent)
        except ValueError:
            words = []
        if not words or ".py:" in words[0]:
            yield f"the agent {self.agent!r} is neither path.py:function nor a command: correct it"
        if self.checker is None:
            yield f"the agent {self.agent!r} is a command, which returns no reward: set checker"
        if self.options:
            yield "options are arguments of an agent's function: write those of a command in the command"

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"options must be what JSON can hold ({error}): write dates and the like as texts"
            ) from error
        return options

    @property
    def own(self) -> bool:
        """Whether the environment is the user's own file."""
        return self.path not in SHIPPED

    @property
    def file(self) -> Path:
        shipped = Path(__file__).parents[1] / "environments" / "shipped" / f"{self.path}.py"
        return Path(self.path.rpartition(":")[0]).absolute() if self.own else shipped

    @property
    def class_name(self) -> str:
        return self.path.rpartition(":")[2] if self.own else SHIPPED[self.path]

    @property
    def title(self) -> str:
        """What messages call the environment."""
        return self.agent or self.class_name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class."""
        checker = {} if self.checker is None else {"checker": _absolute(self.checker)}
        if self.mcp:
            return {**self.options, "servers": self.mcp} | checker
        if self.agent is None:
            return self.options
        command = not AGENT_FUNCTION.fullmatch(self.agent)
        return {"agent": _absolute(self.agent), "options": self.options, "command": command} | checker

    @property
    def functions(self) -> dict[str, tuple[Path, str]]:
        """The user's functions that an agent needs, by field: file and name."""
        places = {"agent": self.agent, "checker": self.checker}
        return {
            field: (Path(place.rpartition(":")[0]).absolute(), place.rpartition(":")[2])
            for field, place in places.items()
            if place is not None and AGENT_FUNCTION.fullmatch(place)
        }


def _absolute(place: str) -> str:
    """Returns path.py:function with the whole path, and a command as it is."""
    path, colon, name = place.rpartition(":")
    return f"{Path(path).absolute()}{colon}{name}" if AGENT_FUNCTION.fullmatch(place) else place


def _environment(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


ShortEnvironment = Annotated[Environment, BeforeValidator(_environment)]
# with the field that names each
REWARD_KINDS = {"model": "model", "function": "function", "http": "url", "judge": "judge"}
VERIFIERS = ("math", "code", "reasoning_gym")


def _reward_sources(value: Any) -> Any:
    """Expands `reward_model`, `path.py:function` and `http://...` into sources, and one source into a
    tuple."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_reward_source(v) for v in values)


def _reward_source(value: Any) -> Any:
    if isinstance(value, str):
        if value in ("environment", "none", *VERIFIERS):
            return {"kind": value}
        kind = "model"
        if value.startswith(("http://", "https://")):
            kind = "http"
        elif re.search(r"\.py:\w+$", value):
            kind = "function"
        return {"kind": kind, REWARD_KINDS[kind]: value}
    if isinstance(value, dict) and isinstance(value.get("verifier"), str):
        return {"kind": value["verifier"], **value}
    if isinstance(value, dict) and "kind" not in value:
        return {
            "kind": next((kind for kind, field in REWARD_KINDS.items() if field in value), "model"),
            **value,
        }
    return value


RewardSource = Annotated[
    ModelReward
    | FunctionReward
    | HttpReward
    | MathReward
    | CodeReward
    | ReasoningGymReward
    | JudgeReward
    | EnvironmentReward
    | NoReward,
    Field(discriminator="kind"),
]


def normalized_in_groups(sources: tuple[RewardSource, ...]) -> bool:
    """Returns whether any source is standardised within the answers to one prompt."""
    return any(source.normalize == "group" for source in sources)


def _named_apart(sources: tuple[RewardSource, ...]) -> tuple[RewardSource, ...]:
    """Returns the sources. Raises ValueError if two have the same name in the metrics."""
    repeated = [title for title, count in Counter(source.title for source in sources).items() if count > 1]
    if repeated:
        raise ValueError(f"two reward sources are called {repeated[0]!r}: give one of them another `name`")
    return sources


RewardSources = Annotated[
    tuple[RewardSource, ...],
    BeforeValidator(_reward_sources),
    Field(min_length=1),
    AfterValidator(_named_apart),
]
