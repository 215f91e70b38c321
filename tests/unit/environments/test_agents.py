"""Agents that one did not write, against engines that answer at once: OpenAI's own client, a function or a
command, summaries in place of a history, several calls at once, faults."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.environments.agents.users_functions import called
from rlhf_core.environments.episode_contract import Episode
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from tests.unit.environments.test_episodes import renderer, run

__all__ = ["renderer"]
LIMITS = Limits(turns=6, prompt_tokens=300, tokens=900, answer_tokens=50)
AGENTS = '''
import asyncio, json, os, subprocess, sys, threading, time, urllib.request
from openai import AsyncOpenAI, BadRequestError, OpenAI

def asks(text): return {"role": "user", "content": text}

def linear(task, base_url, api_key, turns=3):
    """A loop that adds to its messages, written for any model."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "Be short."}, asks("begin")]
    for turn in range(turns):
        reply = client.chat.completions.create(model="any", messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), asks(f"turn {turn}")]
        assert reply.usage.prompt_tokens > 0 and reply.usage.completion_tokens > 1
    return len(messages)

async def compacts(task, base_url, api_key):
    """Keeps a summary in place of its history, after two answers."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [asks("begin")]
    for turn in range(4):
        reply = await client.chat.completions.create(model="any", messages=messages)
        text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, asks("more")]
        if len(messages) > 4: messages = [asks(f"so far: {text}")]
    return 1.0

async def delegates(task, base_url, api_key):
    """Three sub-agents at once, then an answer to what they found."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    async def sub(number):
        reply = await client.chat.completions.create(model="any", messages=[asks(f"part {number}")])
        return reply.choices[0].message.content
    parts = await asyncio.gather(*map(sub, range(3)))
    assert len(parts) == 3
    reply = await client.chat.completions.create(model="any", messages=[asks(" ".join(parts))])
    return 0.5

async def responses(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    first = await client.responses.create(model="any", instructions="Be short.", input="begin")
    second = await client.responses.create(model="any", input="more", previous_response_id=first.id)
    stream = await client.responses.create(
        model="any", input="most", previous_response_id=second.id, stream=True
    )
    kinds = [event async for event in stream]
    assert kinds[-1].type == "response.completed" and kinds[-1].response.output_text.startswith("ok")
    assert "".join(event.delta for event in kinds if event.type == "response.output_text.delta") != ""
    assert second.output_text.startswith("ok") and second.usage.output_tokens > 1
    return 1.0

async def streams(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    options = {"include_usage": True}
    stream = await client.chat.completions.create(
        model="any", messages=[asks("begin")], stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("ok") and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 1
    return 1.0

def limited(task, base_url, api_key):
    return linear(task, base_url, api_key, turns=100)

def survives(task, base_url, api_key):
    try: linear(task, base_url, api_key, turns=100)
    except BadRequestError as error: assert error.code == "context_length_exceeded"
    return 0.75

def gives_up(task, base_url, api_key):
    """A client that leaves before its answer, and asks again."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=5.0)
    try: client.chat.completions.create(model="any", messages=[asks("slow")])
    except Exception as error: assert "timed out" in str(error)
    client.with_options(timeout=250).chat.completions.create(model="any", messages=[asks("begin")])
    return 1.0

def wrong(task, base_url, api_key):
    return task["nowhere"]

def refused(task, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    told = {}
    for field, value in {"stop": ["x"], "n": 2, "tool_choice": "required", "max_tokens": 0.5, "extra_body": {"chat_template_kwargs": {"a": 1}}}.items():
        try: client.chat.completions.create(model="any", messages=[asks("a")], **{field: value})
        except BadRequestError as error: told[field] = str(error)
    assert list(told) == ["stop", "n", "tool_choice", "max_tokens", "extra_body"], told
    try: OpenAI(base_url=base_url, api_key="other", max_retries=0).models.list()
    except Exception as error: assert error.status_code == 401
    assert [model.id for model in client.models.list()] == ["policy"]
    client.chat.completions.create(model="any", messages=[asks("a")], max_tokens=3, temperature=0.1)
    return 1.0

def tools(task, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "description": "d", "parameters": parameters}}
    messages = [asks("call")]
    reply = client.chat.completions.create(model="any", messages=messages, tools=[tool])
    choice = reply.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"at": "x"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "blue"}]
    client.chat.completions.create(model="any", messages=messages, tools=[tool])
    return 1.0

async def hostile(task, base_url, api_key):
    """Requests that are wrong: each is refused once, and costs no other episode anything."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    seen = []
    async def refused(status, path, body):
        try: await client.post(path, body=body, cast_to=object)
        except Exception as error: seen.append(getattr(error, "status_code", error))
        else: seen.append(200)
        assert seen[-1] == status, (seen, body if len(str(body)) < 500 else path)
    chat, responses, ask = "/chat/completions", "/responses", [asks("a")]
    await refused(400, responses, {"input": "a", "max_output_tokens": -1})
    await refused(400, responses, {"input": "a", "max_output_tokens": 10.5})
    await refused(400, responses, {"input": [{"type": "image_generation_call"}]})
    await refused(400, responses, {"input": "a", "tools": [{"type": "web_search"}]})
    await refused(400, chat, {"messages": ask, "tools": [1]})
    await refused(400, chat, {"messages": ask, "tools": "abc"})
    await refused(400, chat, {"messages": [{"role": "user", "content": {"a": 1}}]})
    await refused(400, chat, {"messages": ask, "stream": True, "stream_options": "x"})
    await refused(413, chat, {"messages": [asks("x" * 2 ** 23)]})
    await refused(400, chat, {"messages": [asks("word " * 2000)]})
    await refused(400, chat, [1])
    await client.chat.completions.create(model="any", messages=[asks("begin")])
    return 1.0

def hangs(task, base_url, api_key):
    if task.get("hangs"): time.sleep(1000)
    return linear(task, base_url, api_key, turns=1)

def insists(task, base_url, api_key):
    """Repeats what was refused, for ever."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    client.chat.completions.create(model="any", messages=[asks("begin")])
    while True:
        try: client.chat.completions.create(model="any", messages=[asks("word " * 2000)])
        except BadRequestError: pass

def two_arguments(task, base_url): ...

async def nothing(task, base_url, api_key):
    return 1.0

def check(task, result):
    return float(result.split()[-1]) * task["worth"]
'''
COMMAND = """
import json, os, subprocess, sys, time
from openai import OpenAI

task = json.load(sys.stdin)
if task.get("fault") == "exit": sys.exit("no such thing")
subprocess.Popen(["sleep", "1000"]) if task.get("fault") == "leaves" else None
reply = OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "begin"}])
open(os.path.join(os.environ["TMPDIR"], "notes"), "w").write(reply.choices[0].message.content)
print("thinking\\n0.5")
"""
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


class AtOnce:
    """In place of engines: answers with a number of its own, a call of a tool, or after a while."""

    def __init__(self, renderer: Renderer):
        self._renderer = renderer
        self.aborted = 0

    def reserve(self, requests: int = 1) -> int:
        return 0

    def release(self, engine: int, requests: int = 1) -> None: ...

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Any = ()
    ) -> SampledAnswer:
        last = self._renderer.decoded(list(tokens), True).rpartition("user")[2]
        try:
            await asyncio.sleep(1000 if "slow" in last else 0.01)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        text = CALL if "call" in last else f"ok{seed % 1000}"
        said = [
            *self._renderer.tokenizer(text, add_special_tokens=False).input_ids,
            self._renderer.end_token_id,
        ]
        cut = said[: sampling.max_new_tokens]
        return SampledAnswer(cut, [-1.0] * len(cut), len(cut) == len(said))


Make = Callable[..., tuple[Episodes, AtOnce]]


@pytest.fixture
def make(renderer: Renderer, tmp_path: Path) -> Iterator[Make]:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "command.py").write_text(COMMAND)
    made: list[Episodes] = []
    background = Background()

    def build(agent: str, limits: Limits = LIMITS, **fields: Any) -> tuple[Episodes, AtOnce]:
        named = agent if agent.startswith(sys.executable) else f"{tmp_path / 'agents.py'}:{agent}"
        config = Environment(agent=named, **{"timeout": 250.0, "max_attempts": 1, **fields})
        engines = AtOnce(renderer)
        made.append(Episodes(config, renderer, limits, background, engines))
        return made[-1], engines

    yield build
    for episodes in made:
        episodes.close()
    background.close()


def said_of(episode: Episode, renderer: Renderer) -> list[str]:
    """The sampled texts of the document, one per answer."""
    document = episode.trajectory.document
    text = renderer.decoded(list(document.token_array[document.mask_array]), False)
    end = renderer.decoded([renderer.end_token_id], False)
    return text.split(end)[:-1]


def test_a_loop_that_adds_to_its_messages_is_one_conversation(make: Make, renderer: Renderer) -> None:
    found = run(make("linear")[0], renderer, [{}, {}])
    for episode in found:
        assert episode.failure == "" and episode.rewards == [0.0, 0.0, 8.0]
        path = episode.trajectory
        assert (path.turns, path.conversations, path.finished) == (3, 1, True)
        assert [message["role"] for message in path.messages[:3]] == ["system", "user", "assistant"]
        whole = renderer.decoded(list(path.document.tokens), True)
        answers = said_of(episode, renderer)
        assert len(set(answers)) == 3 and all(whole.count(text) == 1 for text in answers)


def test_a_summary_begins_a_conversation(make: Make, renderer: Renderer) -> None:
    (found,) = run(make("compacts")[0], renderer, [{}])
    path = found.trajectory
    assert (path.turns, path.conversations, len(path.document.starts)) == (4, 2, 1)
    assert len(set(said_of(found, renderer))) == 4 and found.rewards == [0.0, 0.0, 0.0, 1.0]
    second = path.document.token_array[path.document.starts[0] :]
    assert "so far: ok" in renderer.decoded(list(second), True)


@pytest.mark.parametrize("answer_tokens", [50, None])
def test_sub_agents_ask_at_once(make: Make, renderer: Renderer, answer_tokens: int | None) -> None:
    """Without a limit for an answer, each waits until the one before has released what it did not use."""
    limits = LIMITS._replace(answer_tokens=answer_tokens)
    (found,) = run(make("delegates", limits)[0], renderer, [{}])
    assert found.failure == ""
    assert (found.trajectory.turns, found.trajectory.conversations) == (4, 4)
    assert len(said_of(found, renderer)) == 4 and sum(found.rewards) == 0.5


@pytest.mark.parametrize(("agent", "turns"), [("responses", 3), ("streams", 1), ("tools", 2), ("refused", 1)])
def test_the_protocols(make: Make, renderer: Renderer, agent: str, turns: int) -> None:
    (found,) = run(make(agent)[0], renderer, [{}])
    assert found.failure == "" and sum(found.rewards) == 1.0
    assert (found.trajectory.turns, found.trajectory.conversations) == (turns, 1)


def test_a_limit_cuts_the_episode(make: Make, renderer: Renderer) -> None:
    (cut,) = run(make("limited")[0], renderer, [{}])
    assert cut.failure == "" and cut.rewards == [0.0] * 6 and not cut.trajectory.finished
    (goes_on,) = run(make("survives")[0], renderer, [{}])
    assert sum(goes_on.rewards) == 0.75 and not goes_on.trajectory.finished
    short = LIMITS._replace(prompt_tokens=40, tokens=60)
    (full,) = run(make("survives", limits=short)[0], renderer, [{}])
    assert sum(full.rewards) == 0.75 and 1 <= full.trajectory.turns < 6
    assert len(full.trajectory.document) <= 100


def test_an_answer_that_its_client_does_not_wait_for_is_aborted(make: Make, renderer: Renderer) -> None:
    episodes, engines = make("gives_up")
    (found,) = run(episodes, renderer, [{}])
    assert found.failure == "" and engines.aborted == 1 and found.trajectory.turns == 1


def test_wrong_requests_are_refused_one_by_one(make: Make, renderer: Renderer) -> None:
    found = run(make("hostile")[0], renderer, [{}, {}])
    for episode in found:
        assert episode.failure == "" and sum(episode.rewards) == 1.0
        assert (episode.trajectory.turns, episode.trajectory.conversations) == (1, 1)


def test_functions_that_hang_block_no_others(make: Make, renderer: Renderer) -> None:
    rows = [{"hangs": i < 3} for i in range(6)]
    found = run(make("hangs", timeout=30.0, concurrency=2)[0], renderer, rows)
    assert [episode.rewards for episode in found] == [[]] * 3 + [[4.0]] * 3
    assert all("took more than 30 s" in episode.failure for episode in found[:3])


def test_an_agent_that_repeats_a_refused_request_runs_out_of_time(make: Make, renderer: Renderer) -> None:
    (found,) = run(make("insists", timeout=8.0)[0], renderer, [{}])
    assert found.rewards == [] and "took more than 8 s" in found.failure


def test_faults_name_the_agents_line(make: Make, renderer: Renderer, tmp_path: Path) -> None:
    (found,) = run(make("wrong")[0], renderer, [{}])
    line = next(i for i, text in enumerate(AGENTS.splitlines(), 1) if "nowhere" in text)
    assert found.rewards == [] and found.failure == (
        f"KeyError: 'nowhere' ({tmp_path / 'agents.py'}, line {line})"
    )
    (silent,) = run(make("nothing")[0], renderer, [{}])
    assert "without an answer of the model" in silent.failure
    with pytest.raises(ValueError, match="has no function 'nobody'"):
        make("nobody")
    with pytest.raises(ValueError, match="cannot be called with 3 arguments"):
        make("two_arguments")
    with pytest.raises(ValueError, match="unexpected keyword argument 'depth'"):
        make("linear", options={"depth": 1})
    with pytest.raises(ValueError, match="no program"):
        config = Environment(agent="no-such-program --x", checker=f"{tmp_path / 'agents.py'}:check")
        Episodes(config, renderer, LIMITS, Background(), AtOnce(renderer))


def test_a_command(make: Make, renderer: Renderer, tmp_path: Path) -> None:
    command = f"{sys.executable} {tmp_path / 'command.py'}"
    episodes, _ = make(command, checker=f"{tmp_path / 'agents.py'}:check")
    rows = [{"worth": 2.0}, {"worth": 1.0, "fault": "leaves"}, {"worth": 1.0, "fault": "exit"}]
    found = run(episodes, renderer, rows)
    assert [episode.rewards for episode in found] == [[1.0], [0.5], []]
    assert found[2].failure.endswith("exited with status 1: no such thing")
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000"]]
    assert not left, "what the command started ends with its episode"


def test_a_hanging_command_ends_with_its_episode(make: Make, renderer: Renderer, tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(4321)'"
    episodes, _ = make(command, checker=f"{tmp_path / 'agents.py'}:check", timeout=3.0)
    (found,) = run(episodes, renderer, [{"worth": 1.0}])
    assert "took more than 3 s" in found.failure
    deadline = time.monotonic() + 30

    def running() -> bool:
        told = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
        return any(words[-1:] == ["import time; time.sleep(4321)"] for words in told)

    while running():
        assert time.monotonic() < deadline, "the command was not killed"
        time.sleep(0.1)


def test_errors_that_mean_something_else_to_a_future_arrive() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(called(lambda: next(iter(()))))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(called(lambda: 1 / 0))

    async def later() -> int:
        return 3

    assert asyncio.run(called(lambda: later())) == 3
