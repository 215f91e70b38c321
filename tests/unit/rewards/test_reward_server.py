"""The reward server gives what the reward model gives in this process, and survives what clients send."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

import rlhf_core.stages.reward_model
from flows.cli.app import main
from rlhf_core.config import Data, RewardModel
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.rewards.reward_server import application, reward_application
from rlhf_core.runs.run_dir import RunDir
from tests.support.asgi import served
from tests.support.stage_request import stage_request

PROMPTS = [
    [{"role": "user", "content": text}] for text in ("Copy this number: 123", "Reverse this number: 42")
]


@pytest.fixture(scope="module")
def checkpoint(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    pairs = Data(sources=str(material / "preferences.jsonl"), max_samples=32)
    config = RewardModel(
        model="base",
        data=pairs,
        train_batch_size=16,
        micro_train_batch_size=16,
        max_len=96,
        learning_rate=1e-3,
    )
    request = stage_request(config, material / "base", name="rm", seed=7)
    rlhf_core.stages.reward_model.run(request, RunDir(folder))
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    with served(reward_application(str(checkpoint))) as url:
        yield url


def test_it_speaks_the_contract_and_scores_as_the_model_does(url: str, checkpoint: Path) -> None:
    """An answer cut by length is scored without an end token, as the sampler left it."""
    renderer = Renderer(load_tokenizer(str(checkpoint)), "chat")
    samples = [
        Sample(prompt, answer, {}, finished, "")
        for prompt in PROMPTS
        for answer in ("123", "24")
        for finished in (True, False)
    ]
    whole = [renderer.answer(sample.prompt, sample.response) for sample in samples]
    documents = [
        document if sample.finished else Document(document.tokens[:-1], document.mask[:-1])
        for document, sample in zip(whole, samples, strict=True)
    ]
    expected = RewardScorer(str(checkpoint), "float32", 8).score(documents)
    assert HttpRewardClient(url, 30, None).score(samples).rewards == pytest.approx(
        np.array(expected), rel=1e-5, abs=1e-6
    )
    assert len({round(score, 4) for score in expected}) == len(samples), "scores that differ"


def test_it_scores_with_the_arguments_of_the_chat_template(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "argued"
    shutil.copytree(checkpoint, folder)
    tokenizer = load_tokenizer(str(folder))
    own = str(tokenizer.chat_template)
    tokenizer.chat_template = "{% if effort is defined %}{{ effort }}{% endif %}" + own
    tokenizer.save_pretrained(folder)
    sample = Sample(PROMPTS[0], "123", {}, True, "")
    given = {"effort": "low"}
    renderer = Renderer(load_tokenizer(str(folder)), "chat", template_args=given)
    expected = RewardScorer(str(folder), "float32", 8).score([renderer.answer(PROMPTS[0], "123")])
    found = []
    for arguments in (given, {}):
        with served(reward_application(str(folder), template_args=arguments)) as url:
            found.append(HttpRewardClient(url, 30, None).score([sample]).rewards[0])
            assert httpx.get(url).json().get("template_args", {}) == arguments
    assert found[0] == pytest.approx(expected[0], rel=1e-5) and abs(found[0] - found[1]) > 1e-4
    with pytest.raises(ValueError, match="never reads efort"):
        reward_application(str(folder), template_args={"efort": "low"})


@pytest.mark.parametrize("text", ["[1]", "{effort: low}", '{"messages": []}'])
def test_wrong_arguments_of_the_chat_template_are_one_sentence(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-reward", "none", "--template-args", text]) == 2
    assert "template" in capsys.readouterr().err


def test_it_says_what_it_serves(url: str, checkpoint: Path) -> None:
    assert httpx.get(url).json() == {"model": str(checkpoint), "template": "chat"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", "not JSON"),
        ({"prompts": PROMPTS}, "needs the lists prompts and responses"),
        ({"prompts": PROMPTS, "responses": ["1"]}, "lists of one length"),
        (
            {"prompts": [[]], "responses": ["1"]},
            "must be a string or a list of messages, found an empty list",
        ),
        ({"prompts": PROMPTS, "responses": [1, 2]}, "must be a string, found int"),
        (
            {"prompts": [[{"role": "robot", "content": {}}]], "responses": ["1"]},
            "must have a role and a content, both strings",
        ),
    ],
)
def test_a_wrong_request_gets_a_message_that_names_the_fault(url: str, body: Any, expected: str) -> None:
    reply = httpx.post(url, content=body if isinstance(body, bytes) else json.dumps(body))
    assert reply.status_code == 400 and expected in reply.json()["error"]
    assert httpx.post(url, json={"prompts": ["1 + 1"], "responses": ["2"]}).status_code == 200, (
        "and the next one is answered"
    )


def test_each_request_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_KEY", "k-1")
    scored: list[Any] = []
    with served(
        application(lambda answers: [float(len(scored.extend(answers) or answers))], {"model": "m"}, "k-1")
    ) as url:
        for headers in (
            {},
            *(
                {"authorization": given}
                for given in ("k-1", "Bearer", "Bearer k-", "Bearer k-11", "Basic k-1")
            ),
        ):
            assert httpx.get(url, headers=headers).status_code == 401 and scored == []
            refused = httpx.post(url, json={"prompts": ["1"], "responses": ["1"]}, headers=headers)
            assert refused.status_code == 401 and "api_key_env" in refused.json()["error"] and scored == []
        with pytest.raises(ValueError, match=r"answers 401: set api_key_env to the name"):
            HttpRewardClient(url, 30, None).score([Sample(PROMPTS[0], "1", {}, True, "")])
        assert HttpRewardClient(url, 30, "REWARD_KEY").score(
            [Sample(PROMPTS[0], "1", {}, True, "")]
        ).rewards == [1.0]


def test_without_a_key_it_listens_to_this_machine_alone(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-reward", str(checkpoint), "--without-key", "--host", "0.0.0.0"]) == 2
    assert "anyone who reaches that address could use the server" in capfd.readouterr().err


def test_a_request_without_a_length_is_refused(url: str) -> None:
    assert httpx.post(url, content=iter([b"{}"])).status_code == 413
    both = {"content-length": "2", "transfer-encoding": "chunked"}
    assert (
        TestClient(application(lambda answers: [], {})).post("/", content=b"{}", headers=both).status_code
        == 413
    ), "chunks pass a length"


def test_a_failure_of_the_model_is_not_the_clients_fault(capfd: pytest.CaptureFixture[str]) -> None:
    with served(application(lambda answers: [1 / 0], {})) as url:
        reply = httpx.post(url, json={"prompts": ["1 + 1"], "responses": ["2"]})
    assert reply.status_code == 500 and reply.json() == {"error": "the model failed; see the server's log"}
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_request_that_is_not_sent_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.rewards.reward_server.SEND_SECONDS", 0.2)
    with (
        served(application(lambda answers: [], {})) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client,
    ):
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        client.settimeout(60)
        whole = b"".join(iter(lambda: client.recv(4096), b""))
    assert whole.startswith(b"HTTP/1.1 408") and b"the request was not sent within 0.2 s" in whole


def test_the_command_says_what_it_cannot_do(
    checkpoint: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-reward", str(checkpoint), "--port", url.rpartition(":")[2]]) == 3
    assert "nothing can be served on 127.0.0.1:" in capfd.readouterr().err
    assert main(["serve-reward", str(checkpoint), "--template", "Human:"]) == 2
    assert "must be 'chat' or hold exactly one {}" in capfd.readouterr().err


def test_no_reward_model_no_server(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer can be loaded"):
        reward_application(str(tmp_path))
