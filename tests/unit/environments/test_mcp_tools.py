"""Tools of MCP servers, a command (stdio) and an address (streamable HTTP), against engines that answer at
once: sessions of their own, errors of tools, servers that end or hang."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Prompt
from rlhf_core.environments.episode_contract import EpisodeRequest
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from tests.support.micro import wait_until
from tests.unit.environments.test_episodes import SAMPLING, renderer, run

__all__ = ["renderer"]
LIMITS = Limits(turns=4, prompt_tokens=1200, tokens=900, answer_tokens=200)
SERVER = '''
import os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")
counted = 0

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def count() -> int:
    """Counts its calls."""
    global counted
    counted += 1
    return counted

@server.tool()
def fails() -> str:
    """Fails."""
    raise ValueError("the disk is full")

@server.tool()
def long() -> str:
    """Says much."""
    return "x" * 5000

@server.tool()
def hangs() -> str:
    """Hangs."""
    time.sleep(1000)

@server.tool()
def ends() -> str:
    """Ends the server."""
    os._exit(3)

how = {"transport": "streamable-http", "port": int(sys.argv[1])} if len(sys.argv) > 1 else {}
server.run(**how)
'''
CHECK = "def check(task, said):\n    return float(said.endswith(task['wanted']))\n"


class Caller:
    """In place of engines: calls the tool that the task names, then repeats what it got."""

    def __init__(self, renderer: Renderer):
        self._renderer = renderer

    def reserve(self, requests: int = 1) -> int:
        return 0

    def release(self, engine: int, requests: int = 1) -> None: ...

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Any = ()
    ) -> SampledAnswer:
        await asyncio.sleep(0)
        text = self._renderer.decoded(list(tokens), True)
        got = text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        call = text.rpartition("Do ")[2].partition(".")[0]
        said = got[:150] if "<tool_response>" in text else f"<tool_call>\n{call}\n</tool_call>"
        words = self._renderer.tokenizer(said, add_special_tokens=False).input_ids
        whole = [*words, self._renderer.end_token_id]
        return SampledAnswer(whole, [-1.0] * len(whole), True)


Make = Callable[..., Episodes]


@pytest.fixture
def make(renderer: Renderer, tmp_path: Path) -> Iterator[Make]:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "checks.py").write_text(CHECK)
    made: list[Episodes] = []
    background = Background()

    def build(*servers: str, **fields: Any) -> Episodes:
        given = servers or (f"{sys.executable} {tmp_path / 'server.py'}",)
        config = Environment(mcp=given, **{"timeout": 250.0, "max_attempts": 1, **fields})
        made.append(Episodes(config, renderer, LIMITS, background, Caller(renderer)))
        return made[-1]

    yield build
    for episodes in made:
        episodes.close()
    background.close()


def running(server: Path) -> list[psutil.Process]:
    """Returns the processes of a server's command."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(server) in (p.info["cmdline"] or ())]


def row(name: str, answer: str = "", **arguments: Any) -> dict[str, Any]:
    call = json.dumps({"name": name, "arguments": arguments})
    return {"prompt": f"Do {call}.", "answer": answer, "wanted": answer}


def asked(episodes: Episodes, renderer: Renderer, rows: Sequence[dict[str, Any]]) -> list[Any]:
    return run(episodes, renderer, rows, [each["prompt"] for each in rows])


async def asked_later(episodes: Episodes, renderer: Renderer, one: dict[str, Any]) -> Any:
    messages = ({"role": "user", "content": one["prompt"]},)
    prompt = Prompt(messages, renderer.prompt(messages), one, False)
    return await episodes.run([EpisodeRequest(prompt, 0, 0)], SAMPLING)


@contextmanager
def served(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])

    def answers() -> bool:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/mcp", timeout=5)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    try:
        wait_until(answers, "the MCP server")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_tools_of_a_command(make: Make, renderer: Renderer) -> None:
    episodes = make()
    assert [tool["function"]["name"] for tool in episodes._tools][:2] == ["add", "count"]
    rows = [row("add", "5", a=2, b=3), row("add", "6", a=2, b=3), row("count", "1"), row("count", "1")]
    found = asked(episodes, renderer, rows)
    assert [episode.failure for episode in found] == [""] * 4
    assert [sum(episode.rewards) for episode in found] == [1.0, 0.0, 1.0, 1.0], "each has its own session"
    roles = [message["role"] for message in found[0].trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_tools_of_an_address(make: Make, renderer: Renderer, tmp_path: Path) -> None:
    with served(tmp_path) as url:
        episodes = make(url, checker=f"{tmp_path / 'checks.py'}:check")
        found = asked(episodes, renderer, [row("add", "5", a=2, b=3), row("add", "7", a=2, b=3)])
        assert [sum(episode.rewards) for episode in found] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("fails", {}, "error: Error executing tool fails"),  # servers hide what raised
        ("nobody", {}, "error: there is no tool 'nobody'"),
        ("hangs", {}, "error: stopped after 2 s"),
        ("add", {}, "error:"),
        ("add", {"a": "\ud800", "b": 1}, "error: the arguments cannot be sent"),
    ],
)
def test_the_model_sees_what_fails(
    make: Make, renderer: Renderer, tmp_path: Path, name: str, arguments: dict[str, Any], told: str
) -> None:
    seconds = 2.0 if name == "hangs" else 200.0
    episodes = make(options={"seconds": seconds})
    (found,) = asked(episodes, renderer, [row(name, **arguments)])
    assert found.failure == "" and told in found.trajectory.messages[2]["content"]
    assert not running(tmp_path / "server.py"), "a server ends with its episode, also one that hangs"


def test_servers_end_with_the_environments_process(make: Make, renderer: Renderer, tmp_path: Path) -> None:
    episodes = make(options={"seconds": 200.0})
    waiting = episodes._background.start(asked_later(episodes, renderer, row("hangs")))
    wait_until(lambda: running(tmp_path / "server.py"), "the server of the episode")
    episodes.close()
    wait_until(lambda: not running(tmp_path / "server.py"), "the end of the server")
    assert not waiting.done() or waiting.exception() is not None, "the episode had no result"
    waiting.cancel()


def test_a_long_result_is_cut(make: Make, renderer: Renderer) -> None:
    (found,) = asked(make(options={"longest": 40}), renderer, [row("long")])
    assert found.trajectory.messages[2]["content"] == "x" * 40 + "\n[4960 more characters]"


def test_a_server_that_ends_fails_the_attempt(make: Make, renderer: Renderer) -> None:
    found = asked(make(), renderer, [row("ends"), row("add", "5", a=2, b=3)])
    assert found[0].rewards == [] and "ended during a call" in found[0].failure
    assert sum(found[1].rewards) == 1.0


def test_a_limit_ends_the_episode(make: Make, renderer: Renderer) -> None:
    episodes = make()
    episodes._limits = LIMITS._replace(turns=1)
    (found,) = asked(episodes, renderer, [row("add", "5", a=2, b=3)])
    assert found.failure == "" and found.rewards == [0.0] and not found.trajectory.finished


def test_servers_that_cannot_be_asked_are_named(make: Make) -> None:
    with pytest.raises(ValueError, match="environment: the MCP server no-such-server lists no tools") as told:
        make("no-such-server --key secret")
    assert "secret" not in str(told.value)
    with pytest.raises(ValueError, match="lists no tools"):
        make(f"http://127.0.0.1:{free_port()}/mcp")
    with pytest.raises(ValueError, match="the variable NO_SUCH_TOKEN is empty"):
        make(options={"token_env": "NO_SUCH_TOKEN"})
