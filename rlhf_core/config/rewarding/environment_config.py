"""Configures the environment that the policy interacts with, and its agents, tools and packages.
Torch-free."""

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

# fields that replace path, and the file in shipped/ that each selects
IN_PLACE_OF_PATH = {
    "agent": "agent",
    "mcp": "mcp_tools",
    "verifiers": "verifiers_episodes",
    "openenv": "openenv_episodes",
}
AGENT_FUNCTION = re.compile(r"\S+\.py:[A-Za-z_]\w*")
# alignflow's own environments, with their class in shipped/NAME.py
SHIPPED = {
    "guess": "Guess",
    "tools": "Tools",
    "agent": "Agent",
    "mcp_tools": "McpTools",
    "verifiers_episodes": "VerifiersEpisodes",
    "openenv_episodes": "OpenEnvEpisodes",
}


class Environment(Config):
    """The environment that the policy interacts with over several turns. The short form `environment:
    path.py:Class` means `{path: path.py:Class}`."""

    path: str = Field(
        description=(
            "path.py:Class of your own, or guess or tools; omit it with agent, mcp, verifiers or openenv"
        )
    )
    agent: str | None = Field(
        None,
        description=(
            "an agent that calls the policy through an OpenAI-compatible endpoint: path.py:function, or a"
            " command"
        ),
        json_schema_extra=RECIPE_ONLY,
    )
    mcp: tuple[str, ...] = Field(
        (),
        description="addresses or commands of MCP servers whose tools the model may call",
        json_schema_extra=RECIPE_ONLY,
    )
    verifiers: Annotated[str | None, InDigestIfSet] = Field(
        None,
        description="an installed environment of the verifiers package",
        json_schema_extra=RECIPE_ONLY,
        min_length=1,
    )
    openenv: Annotated[str | None, InDigestIfSet] = Field(
        None,
        description="address of an OpenEnv server: http://..., https://..., ws://... or wss://...",
        json_schema_extra=RECIPE_ONLY,
        pattern=r"^(http|ws)s?://\S+$",
    )
    python: Annotated[str | None, NotInDigest] = Field(
        None,
        description=(
            "with verifiers: Python interpreter that has the environment installed; default: the one that"
            " runs alignflow"
        ),
        json_schema_extra=RECIPE_ONLY,
        min_length=1,
    )
    checker: str | None = Field(
        None,
        description=(
            "path.py:function that returns the reward. With agent: for the agent's result (default: the"
            " result is the reward); with mcp: for the last answer (default: 1 if it equals the row's answer)"
        ),
        json_schema_extra=RECIPE_ONLY,
        pattern=r"^\S+\.py:[A-Za-z_]\w*$",
    )
    options: dict[str, Any] = Field(
        {},
        description=(
            "arguments for the class, the agent's function, the verifiers environment, or OpenEnv's client"
            " (docs/how-to/openenv.md)"
        ),
    )
    images: Annotated[bool, InDigestIfSet] = Field(
        False,
        description="whether the environment may send images; the policy and the engines must then read them",
    )
    max_turns: Positive = Field(8, description="maximum number of answers per episode")
    answer_max_len: Positive | None = Field(
        None,
        description=(
            "maximum tokens of one answer; default: the rest of generate_max_len, which all tokens after the"
            " prompt share"
        ),
    )
    timeout: Annotated[Rate, NotInDigest] = Field(
        60.0,
        description=(
            "time limit in seconds for the environment itself per episode, not counting the model's time"
        ),
    )
    max_attempts: Annotated[Positive, NotInDigest] = Field(
        3, description="maximum number of attempts at an episode; after that it gets no reward"
    )
    processes: Annotated[Positive, NotInDigest] = Field(
        1, description="number of processes that run episodes"
    )
    concurrency: Annotated[Positive, NotInDigest] = Field(
        1024, description="episodes that one process runs at once"
    )
    sandbox: Annotated[Literal["bubblewrap", "none"], NotInDigest] = Field(
        "bubblewrap",
        description="where tools run programs. bubblewrap: in a sandbox; none: with all your permissions",
        json_schema_extra=RECIPE_ONLY,
    )

    @field_validator("path")
    @classmethod
    def _named(cls, path: str) -> str:
        if path not in SHIPPED and not re.search(r"\.py:[A-Za-z_]\w*$", path):
            raise ValueError(
                f"{path!r} is not an environment: give a class as path.py:Class, or one of"
                f" {', '.join(SHIPPED)}"
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
                yield f"{field} replaces path: leave path out, or set only {field}"
        if self.python is not None and self.verifiers is None:
            yield "python applies only to verifiers: leave it out, or set verifiers instead of path"
        if self.checker is not None and not (self.agent or self.mcp):
            yield "checker applies only to agent and mcp: leave it out, or set one of them instead of path"
        for field, servers in (("mcp", self.mcp), ("openenv", [self.openenv or ""])):
            if any("@" in urlsplit(server).netloc for server in servers if "://" in server):
                yield (
                    f"an address in {field} contains a password: put it into an environment variable, and"
                    " name that variable in options.token_env"
                )
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
            yield "options apply only to an agent's function: write a command's arguments into the command"

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"options must be valid JSON values ({error}): write dates and similar values as strings"
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
        """The environment's name in messages."""
        return self.agent or self.verifiers or self.class_name

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the class."""
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
        """The file and name of each user function that an agent needs, by field."""
        places = {"agent": self.agent, "checker": self.checker}
        return {
            field: (Path(place.rpartition(":")[0]).absolute(), place.rpartition(":")[2])
            for field, place in places.items()
            if place is not None and AGENT_FUNCTION.fullmatch(place)
        }


def _absolute(place: str) -> str:
    """Returns path.py:function with its absolute path, and a command unchanged."""
    path, colon, name = place.rpartition(":")
    return f"{Path(path).absolute()}{colon}{name}" if AGENT_FUNCTION.fullmatch(place) else place


def _environment(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


ShortEnvironment = Annotated[Environment, BeforeValidator(_environment)]
