"""Configures the environment that the policy talks to, and its agents, tools and packages. Torch-free."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlhf_core.records import RECIPE_ONLY, Config, InDigestIfSet, NotInDigest, Positive, Rate, check

# fields in place of path, and the file in shipped/ that each means
IN_PLACE_OF_PATH = {
    "agent": "agent",
    "mcp": "mcp_tools",
    "verifiers": "verifiers_episodes",
    "openenv": "openenv_episodes",
}
AGENT_FUNCTION = re.compile(r"\S+\.py:[A-Za-z_]\w*")
# alignflow's environments and their class in shipped/NAME.py
SHIPPED = {
    "guess": "Guess",
    "tools": "Tools",
    "agent": "Agent",
    "mcp_tools": "McpTools",
    "verifiers_episodes": "VerifiersEpisodes",
    "openenv_episodes": "OpenEnvEpisodes",
}


class Environment(Config):
    """The environment that the policy talks to over several turns. The short form `environment:
    path.py:Class` means `{path: path.py:Class}`."""

    path: str = Field(
        description=(
            "path.py:Class of your own, or guess or tools; left out with agent, mcp, verifiers or openenv"
        )
    )
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
    verifiers: Annotated[str | None, InDigestIfSet] = Field(
        None,
        description="an installed environment of the package verifiers",
        json_schema_extra=RECIPE_ONLY,
        min_length=1,
    )
    openenv: Annotated[str | None, InDigestIfSet] = Field(
        None,
        description="address of a server of OpenEnv: http://..., https://..., ws://... or wss://...",
        json_schema_extra=RECIPE_ONLY,
        pattern=r"^(http|ws)s?://\S+$",
    )
    python: Annotated[str | None, NotInDigest] = Field(
        None,
        description=(
            "with verifiers: interpreter that has the environment installed; default: the one that runs"
            " alignflow"
        ),
        json_schema_extra=RECIPE_ONLY,
        min_length=1,
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
    options: dict[str, Any] = Field(
        {},
        description=(
            "arguments of the class, of the agent's function, of the verifiers environment, or of OpenEnv's"
            " client (docs/how-to/openenv.md)"
        ),
    )
    images: Annotated[bool, InDigestIfSet] = Field(
        False,
        description="whether the environment may send images, which policy and engines must then read",
    )
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
        if self.python is not None and self.verifiers is None:
            yield "python is for verifiers: leave it out, or set verifiers in place of path"
        if self.checker is not None and not (self.agent or self.mcp):
            yield "checker is for agent and mcp: leave it out, or set one of them in place of path"
        for field, servers in (("mcp", self.mcp), ("openenv", [self.openenv or ""])):
            if any("@" in urlsplit(server).netloc for server in servers if "://" in server):
                yield f"an address in {field} holds a password: name its variable in options.token_env"
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
        shipped = Path(__file__).parents[2] / "environments" / "shipped" / f"{self.path}.py"
        return Path(self.path.rpartition(":")[0]).absolute() if self.own else shipped

    @property
    def class_name(self) -> str:
        return self.path.rpartition(":")[2] if self.own else SHIPPED[self.path]

    @property
    def title(self) -> str:
        """What messages call the environment."""
        return self.agent or self.verifiers or self.class_name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class."""
        checker = {} if self.checker is None else {"checker": _absolute(self.checker)}
        if self.verifiers is not None:
            return {"name": self.verifiers, "options": self.options, "python": self.python}
        if self.openenv is not None:
            return {**self.options, "url": self.openenv}
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
