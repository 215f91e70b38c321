"""Agents and tools whose messages have images: several conversations of one episode, tools of MCP servers, and
what is refused."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mcp.types import ImageContent
from PIL import Image

from rlhf_core.config import Data
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.pictures import environment_content
from rlhf_core.data.pictures.environment_content import EXCESS, images_that_fit, in_base64, sent_content
from rlhf_core.data.pictures.message_parts import content_text
from rlhf_core.data.sources import prompts
from rlhf_core.environments.agents.mcp_session import part_of
from rlhf_core.environments.conversation import Conversation
from rlhf_core.environments.joined_calls import JoinedCalls
from rlhf_core.environments.trajectories.joined_trajectories import JoinedTrajectories
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import masked_logprobs
from rlhf_core.objectives.collate import collate
from rlhf_core.rollout.engine_contract import answer_of
from tests.support.pictured_models import QWEN_TEMPLATE, square, write_rows
from tests.support.screenshots import Scripted, opened
from tests.unit.environments.test_image_episodes import STATEFUL, model, qwen, renderer_of, screens

__all__ = ["model", "qwen", "screens"]
# with tools and their calls
CALLING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + QWEN_TEMPLATE.partition("<|im_end|>")[0]
    + "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    + "<|im_end|>"
    + QWEN_TEMPLATE.partition("<|im_end|>")[2]
)
SERVER = """
import sys
from pathlib import Path
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("screen")

@server.tool(structured_output=False)
def screenshot():
    return ["taken", Image(path=Path(sys.argv[1])), "x" * 7]

server.run()
"""


@torch.no_grad()
def test_conversations_with_images_of_one_episode_are_trained_as_each_alone(model: Path) -> None:
    """An agent's: a first conversation, a fork of it before its second image, and another one."""
    if STATEFUL.search(model.name):
        pytest.skip("the family is not trained on several sequences in a row")
    renderer = renderer_of(model)
    limits = Limits(turns=9, prompt_tokens=200, tokens=400, answer_tokens=None)

    def no_calls() -> Any:
        raise AssertionError("there are no tools")

    paths = JoinedTrajectories(Prompt((), [], {}, False), renderer, limits, [], no_calls)
    said = Scripted(renderer)
    calls = JoinedCalls(images=True)
    numbers = iter(range(9))

    def answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        place = calls.place(messages, [])
        request = {
            "ask": place.new,
            "conversation": place.conversation.number,
            "fork": place.fork,
            "tools": [],
        }
        call = next(numbers)
        paths.ask(call, request)
        said.asked.append(([], paths.pictures_of(call)))
        _, message = paths.take(call, answer_of(said.answer, [-1.0] * len(said.answer), True))
        calls.answered(place.conversation, message)
        return [*messages, {"role": "assistant", "content": message["content"]}]

    first = answered([user(url("red", 40), "A?")])
    second = answered([*first, user(url("green"), "B?")])
    answered([*first, user("C?")])
    answered([user("D?", url("blue", 24))])
    answered([*second, user("E?")])
    assert [len(pictures) for _, pictures in said.asked] == [1, 2, 1, 1, 2]
    assert paths.conversations == 3
    document = paths.document
    assert len(document.pictures) == 4 and len(document.starts) == 2
    policy = load_policy(str(model)).eval()
    reader = reads_pictures(policy, str(model), renderer.tokenizer, "float32", 1)
    joined = masked_logprobs(policy, collate([[whole_mask(document)]], 0, reader=reader)).logprobs[0]
    for begin, end in pairwise([0, *document.starts, len(document)]):
        own = [
            picture._replace(start=picture.start - begin, stop=picture.stop - begin)
            for picture in document.pictures
            if begin <= picture.start < end
        ]
        alone = Document(list(document.tokens[begin:end]), [True] * (end - begin), pictures=tuple(own))
        expected = masked_logprobs(policy, collate([[alone]], 0, reader=reader)).logprobs[0]
        torch.testing.assert_close(joined[begin + 1 : end], expected[1 : end - begin], atol=1e-5, rtol=1e-5)


def whole_mask(document: Document) -> Document:
    return replace(document, tokens=list(document.tokens), mask=[True] * len(document))


def url(colour: str, width: int = 16) -> dict[str, Any]:
    content = base64.b64encode(square(colour, width)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("images", "part", "told"),
    [
        (False, url("red"), "set images: true"),
        (True, {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "none is opened"),
        (True, {"type": "image_url", "image_url": {"url": "b.png"}}, "not in the data's folder"),
        (True, {"type": "input_audio", "input_audio": {"data": ""}}, "a part of type 'input_audio'"),
        (True, {"type": "image"}, "without content"),
    ],
)
def test_what_an_agent_may_not_send(images: bool, part: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        JoinedCalls(images).place([user(part, "What?")], [])


def test_the_files_of_the_rows_own_images_are_read_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name, colour in (("own", "red"), ("other", "blue")):
        (tmp_path / "images" / f"{name}.png").write_bytes(square(colour))
    file = str(tmp_path / "images" / "own.png")
    calls = JoinedCalls(True, {"images/own.png": file, file: file})
    forms: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": "images/own.png"}},
        {"type": "image_url", "image_url": file},
        {"type": "image", "image": file},
        {"type": "image", "path": "images/own.png"},
        {"type": "image", "image": {"path": file}},
    ]
    for part in forms:
        ((shown, _),) = [message["content"] for message in calls.place([user(part, "What?")], []).new]
        assert shown == {"type": "image", "image": in_base64(square("red"))}
    others = [
        "images/other.png",
        str(tmp_path / "images" / "other.png"),
        "images/../images/own.png",
        "images/./own.png",
        "own.png",
        f"file://{file}",
        "/etc/passwd",
        str(tmp_path / "images"),
        "",
    ]
    for path in others:
        with pytest.raises(ValueError, match=r"data's folder|none is opened|neither a path nor bytes"):
            calls.place([user({"type": "image", "image": path}, "What?")], [])
    Path(file).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        calls.place([user(forms[0], "What?")], [])
    with pytest.raises(ValueError, match="has a part of type 'image'"):
        calls.place([{"role": "assistant", "content": [forms[2]]}, user("What?")], [])


def test_an_agent_sends_back_the_images_of_its_row(qwen: Path, screens: Path, tmp_path: Path) -> None:
    """By the paths of the row, which has two files of one name in folders of the data."""
    renderer = renderer_of(qwen)
    data = tmp_path / "data"
    contents = {"a/1.png": square("green", 24), "b/1.png": square("blue"), "1.png": square("red")}
    for path, content in contents.items():
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).write_bytes(content)
    parts = [{"type": "image", "image": path} for path in ("a/1.png", "b/1.png")]
    row = {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]}
    rows = write_rows(data / "rows.jsonl", [row])
    (read,) = prompts(Data(sources=str(rows)), renderer, 200, 0).items
    for named, expected in (
        ("a/1.png", contents["a/1.png"]),
        ("b/1.png", contents["b/1.png"]),
        (str(data / "a" / "1.png"), contents["a/1.png"]),
        ("1.png", None),
        (str(data / "1.png"), None),
        ("red.png", None),
    ):
        with opened(screens, renderer, Scripted(renderer), kind="Asker", images=False) as run:
            episode = run(replace(read, row={**read.row, "named": named}))
        if expected is None:
            assert "is not in the data's folder" in episode.failure
        else:
            (shown,) = episode.trajectory.document.pictures
            assert episode.failure == "" and shown.source.encoded() == expected


def test_bytes_are_sent_although_they_have_the_path_of_the_rows_image(tmp_path: Path) -> None:
    file = str(tmp_path / "own.png")
    Path(file).write_bytes(square("red"))
    part = {"type": "image", "image": {"bytes": square("blue"), "path": file}}
    ((shown, _),) = [
        message["content"] for message in JoinedCalls(True, {file: file}).place([user(part, "What?")], []).new
    ]
    assert shown["image"] == in_base64(square("blue"))


def test_texts_in_all_their_forms_are_one_text_whether_images_are_read_or_not() -> None:
    content = ["a", {"text": "b"}, {"type": "text", "text": "c"}]
    for images in (True, False):
        place = JoinedCalls(images).place([{"role": "user", "content": content}], [])
        assert place.new == [{"role": "user", "content": "abc"}]
    (mixed,) = JoinedCalls(True).place([{"role": "user", "content": [*content, url("red")]}], []).new
    assert [part["type"] for part in mixed["content"]] == ["text"] * 3 + ["image"]


def test_other_images_are_another_conversation() -> None:
    calls = JoinedCalls(images=True)
    place = calls.place([user(url("red"), "What?")], [])
    calls.answered(place.conversation, {"role": "assistant", "content": "a"})
    follow = [{"role": "assistant", "content": "a"}, user("And?")]
    other = calls.place([user(url("blue"), "What?"), *follow], [])
    same = calls.place([user(url("red"), "What?"), *follow], [])
    assert other.conversation is not place.conversation and same.conversation is place.conversation


def test_the_image_of_an_mcp_tool_is_seen(qwen: Path, screens: Path) -> None:
    tokenizer = load_tokenizer(str(qwen))
    tokenizer.chat_template = CALLING
    renderer = Renderer(tokenizer, "chat")
    (screens / "server.py").write_text(SERVER)
    call = '<tool_call>\n{"name": "screenshot", "arguments": {}}\n</tool_call>'
    command = f"{sys.executable} {screens / 'server.py'} {screens / 'red.png'}"
    messages = ({"role": "user", "content": "Look."},)
    limits = Limits(turns=4, prompt_tokens=2000, tokens=400, answer_tokens=None)
    fields = {"mcp": (command,), "path": "mcp_tools", "options": {"longest": 5}, "timeout": 250.0}
    for images in (True, False):
        prompt = Prompt(messages, renderer.prompt(messages), {"answer": "ok"}, False)
        engines = Scripted(renderer, call)
        with opened(screens, renderer, engines, limits=limits, images=images, **fields) as run:
            episode = run(prompt)
        assert episode.failure == "" and sum(episode.rewards) == 1.0
        pictures = episode.trajectory.document.pictures
        result = episode.trajectory.messages[2]
        assert result["role"] == "tool"
        if images:
            (name,) = [part["image"] for part in result["content"] if part["type"] == "image"]
            shown = f"taken<image {name}>xxxxx\n[2 more characters]"
            assert content_text(result["content"]) == shown
        assert [picture.source.encoded() for picture in pictures] == [square("red", 40)] * images
    assert result["content"] == "taken\n[16 more characters]", "three lines, the second says [image]"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"<svg/>", "error: an image is not JPEG, PNG, WebP, GIF or BMP: convert it"),
        (square("red")[:50], "error: an image is damaged"),
        (b"", "error: an image has neither a path nor bytes: give one of them"),
        (square("red"), ""),
    ],
)
def test_an_image_of_a_tool_that_cannot_be_read_is_told_to_the_model(content: bytes, told: str) -> None:
    data = base64.b64encode(content).decode()
    part = part_of(ImageContent(type="image", data=data, mime_type="image/png"))
    if told:
        assert part["type"] == "text" and part["text"].startswith(told)
    else:
        assert part == {"type": "image", "base64": data}


def test_images_of_results_over_the_limit_are_told_to_the_model_and_the_episode_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = base64.b64encode(square("red")).decode()
    image = {"type": "image", "base64": content}
    told = {"type": "text", "text": environment_content.EXCESS}
    monkeypatch.setattr(environment_content, "MAX_BYTES", 2 * len(square("red")) + 50)
    text = {"type": "text", "text": "taken"}
    assert images_that_fit([]) == []
    assert images_that_fit(["a", [text, image]]) == ["a", [text, image]]
    found = images_that_fit([[image, text], "a", [image, image], [text, image]])
    assert found == [[image, text], "a", [image, told], [text, told]]
    messages = [{"content": sent_content(content, True, None)} for content in found]
    environment_content.check_size(messages)
    larger = {"type": "image", "base64": 4 * content}
    assert images_that_fit([[larger, image]]) == [[told, image]], "a smaller one after it still fits"


def test_more_images_of_results_than_an_episode_may_have_are_told_to_the_model(
    qwen: Path, screens: Path
) -> None:
    image = {"type": "image", "base64": base64.b64encode(square("red")).decode()}
    text = {"type": "text", "text": "taken"}
    told = {"type": "text", "text": environment_content.TOO_MANY}
    found = images_that_fit([[image] * 2, "a", [text, image, image, text]], before=253)
    assert found == [[image] * 2, "a", [text, image, told, text]]
    tokenizer = load_tokenizer(str(qwen))
    tokenizer.chat_template = CALLING
    renderer = Renderer(tokenizer, "chat")
    many = SERVER.replace("Image(path=Path(sys.argv[1]))", "*[Image(path=Path(sys.argv[1]))] * 200")
    (screens / "server.py").write_text(many)
    call = '<tool_call>\n{"name": "screenshot", "arguments": {}}\n</tool_call>'
    command = f"{sys.executable} {screens / 'server.py'} {screens / 'blue.png'}"
    limits = Limits(turns=4, prompt_tokens=40_000, tokens=40_000, answer_tokens=None)
    messages = ({"role": "user", "content": "Look."},)
    prompt = Prompt(messages, renderer.prompt(messages), {"answer": "ok"}, False)
    fields = {"mcp": (command,), "path": "mcp_tools", "options": {}, "timeout": 250.0}
    with opened(
        screens, renderer, Scripted(renderer, call, call), limits=limits, images=True, **fields
    ) as run:
        episode = run(prompt)
    assert episode.failure == "" and sum(episode.rewards) == 1.0
    assert len(episode.trajectory.document.pictures) == 256
    last = content_text(episode.trajectory.messages[4]["content"])
    assert last.count(environment_content.TOO_MANY) == 144


def test_two_screenshots_at_the_same_time_over_the_limit_do_not_fail_the_episode(
    qwen: Path, screens: Path
) -> None:
    """The images of both calls of an answer have about 40 MB."""
    tokenizer = load_tokenizer(str(qwen))
    tokenizer.chat_template = CALLING
    renderer = Renderer(tokenizer, "chat")
    (screens / "server.py").write_text(SERVER)
    noise = Image.frombytes("RGB", (2600, 2600), os.urandom(3 * 2600 * 2600))
    noise.save(screens / "large.png")
    call = '<tool_call>\n{"name": "screenshot", "arguments": {}}\n</tool_call>'
    command = f"{sys.executable} {screens / 'server.py'} {screens / 'large.png'}"
    limits = Limits(turns=4, prompt_tokens=4000, tokens=4000, answer_tokens=None)
    fields = {"mcp": (command,), "path": "mcp_tools", "options": {"longest": 5}, "timeout": 250.0}
    messages = ({"role": "user", "content": "Look."},)
    prompt = Prompt(messages, renderer.prompt(messages), {"answer": "ok"}, False)
    with opened(
        screens, renderer, Scripted(renderer, call + call), limits=limits, images=True, **fields
    ) as run:
        episode = run(prompt)
    assert episode.failure == "" and sum(episode.rewards) == 1.0
    assert len(episode.trajectory.document.pictures) == 1
    shown = [content_text(message["content"]) for message in episode.trajectory.messages[2:4]]
    assert EXCESS not in shown[0] and EXCESS in shown[1]


def test_the_images_of_a_request_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    content = square("red")
    monkeypatch.setattr(environment_content, "MAX_BYTES", 2 * len(content) + 50)

    async def ask(request: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "a"}
        return {
            "text": "a",
            "finished": True,
            "calls": [],
            "prompt_tokens": 1,
            "tokens": 1,
            "message": message,
            "call": 0,
        }

    async def tried() -> None:
        model = Conversation([], 0, ask, images=True)
        part = {"type": "image", "image": content}
        await model.answer(user(part, part))
        with pytest.raises(ValueError, match="have more than"):
            await model.answer(user(part, part), user(part))
        await model.answer(user(part))
        with pytest.raises(ValueError, match="have more than"):
            await model.complete([user(url("red"), url("red"), url("red"))])
        await model.complete([user(url("red"))])

    asyncio.run(tried())
