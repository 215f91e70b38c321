"""Requests to this machine use no proxy, whatever the environment names; a request that fails through one
says which."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import RewardError, Sample
from rlhf_core.system.proxies import bypass_loopback, proxy_of
from tests.support.chat_endpoint import Reply, completion, serving
from tests.support.judging import matches, openai_judge
from tests.support.micro import ROOT
from tests.support.programs import captured

DEAD = "http://127.0.0.1:9"  # nothing listens there
LOOPBACK = "127.0.0.1,localhost,::1"
LIBRARIES = """
import asyncio, sys, urllib.request
import aiohttp, httpx, requests
import {entry}
url = sys.argv[1]
async def status():
    async with aiohttp.ClientSession(trust_env=True) as session, session.post(url, json={{}}) as answer:
        return answer.status
print(asyncio.run(status()))
for place in (url, url.replace("127.0.0.1", "localhost")):
    print(httpx.post(place, json={{}}).status_code, requests.post(place, json={{}}).status_code)
    print(urllib.request.urlopen(urllib.request.Request(place, b"{{}}")).status)
"""
CLIENTS = """
import sys
from pathlib import Path
from rlhf_core.__main__ import main
main(["no such run"])
from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.rewards.remote import HttpRewardClient
from tests.support.judging import matches, openai_judge, scores
chat, reward, folder = sys.argv[1:]
print(HttpRewardClient(reward, 5.0, None).score([Sample([], "a", {}, True, "a")])[0].tolist())
print(scores(openai_judge(chat, Path(folder)).judge(matches(1))))
"""


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("no_proxy", "NO_PROXY"):  # so that what the code sets does not outlive the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def environment_of(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def said(script: str, *arguments: str, **more: str) -> str:
    done = captured([sys.executable, "-c", script, *arguments], env=environment_of(**more), timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("set_before", "no_proxy", "of_upper_case"),
    [
        ({"HTTP_PROXY": DEAD}, LOOPBACK, LOOPBACK),
        ({"https_proxy": DEAD}, LOOPBACK, LOOPBACK),
        ({"ALL_PROXY": DEAD}, LOOPBACK, LOOPBACK),
        (
            {"HTTP_PROXY": DEAD, "NO_PROXY": ".corp, 10.0.0.1"},
            f".corp,10.0.0.1,{LOOPBACK}",
            f".corp,10.0.0.1,{LOOPBACK}",
        ),
        ({"HTTP_PROXY": DEAD, "no_proxy": "a", "NO_PROXY": "b"}, f"a,{LOOPBACK}", f"b,{LOOPBACK}"),
        ({"HTTP_PROXY": DEAD, "no_proxy": "localhost"}, "localhost,127.0.0.1,::1", "localhost,127.0.0.1,::1"),
        ({"HTTP_PROXY": DEAD, "NO_PROXY": "*"}, "*", "*"),
        ({}, None, None),
        ({"HTTP_PROXY": ""}, None, None),
        ({"NO_PROXY": "a"}, None, "a"),
    ],
)
def test_loopback_is_added_to_the_users_entries(
    set_before: dict[str, str],
    no_proxy: str | None,
    of_upper_case: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # a child does it again
        bypass_loopback()
        assert (os.environ.get("no_proxy"), os.environ.get("NO_PROXY")) == (no_proxy, of_upper_case)
    if no_proxy not in (None, "*"):
        mounts = httpx.Client()._mounts  # it reads every entry
        assert {"all://127.0.0.1", "all://localhost", "all://[::1]"} <= {
            pattern.pattern for pattern in mounts
        }


@pytest.mark.parametrize("entry", ["flows", "tasks", "tasks.stages", "flows.prefect_process"])
def test_every_client_reaches_a_server_of_this_machine(entry: str) -> None:
    with serving(lambda number, _: completion("hello")) as endpoint:
        url = f"{endpoint.url}/chat/completions"
        told = said(LIBRARIES.format(entry=entry), url, HTTP_PROXY=DEAD, http_proxy=DEAD, ALL_PROXY=DEAD)
    assert told.split() == ["200"] * 7


def test_a_stages_process_reaches_reward_servers_and_judges_of_this_machine(tmp_path: Path) -> None:
    def reward(number: int, _: dict[str, Any]) -> Reply:
        return 200, {"content-type": "application/json"}, json.dumps({"rewards": [0.5]}).encode()

    with serving(lambda number, _: completion("[[A>B]]")) as chat, serving(reward) as rewards:
        told = said(CLIENTS, chat.url, rewards.url, str(tmp_path), HTTP_PROXY=DEAD, JUDGE_KEY="key")
    assert "[0.5]" in told.splitlines() and "['A>B']" in told.splitlines()


@pytest.mark.parametrize(
    ("proxies", "url", "sentence"),
    [
        (
            {"HTTP_PROXY": "http://me:secret@proxy.corp:3128/"},
            "http://far/score",
            "proxy.corp:3128 that HTTP_PROXY names",
        ),
        ({"HTTP_PROXY": "a:1", "http_proxy": "b:2"}, "http://far/", "b:2 that http_proxy names"),
        ({"ALL_PROXY": "socks5://a:1"}, "https://far/", "a:1 that ALL_PROXY names"),
        ({"HTTP_PROXY": "http://a:1"}, "https://far/", ""),
        ({"HTTP_PROXY": "http://a:1", "NO_PROXY": "far"}, "http://far:80/", ""),
        ({"HTTP_PROXY": "http://a:1", "NO_PROXY": LOOPBACK}, "http://127.0.0.1:80/", ""),
        ({}, "http://far/", ""),
        ({"HTTP_PROXY": "http://a:1"}, "http://[far/", ""),
    ],
)
def test_the_proxy_of_an_address_is_named_without_credentials(
    proxies: dict[str, str], url: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    told = proxy_of(url)
    assert told == (
        f", through the proxy {sentence} (NO_PROXY lists hosts to reach without one)" if sentence else ""
    )


def test_a_reward_server_and_a_judge_behind_a_dead_proxy_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("JUDGE_KEY", "key")
    with pytest.raises(RewardError) as failed:
        HttpRewardClient("http://rewards.invalid/score", 5.0, None).score([Sample([], "a", {}, True, "a")])
    judge = openai_judge("http://judge.invalid/v1", tmp_path, max_failed=1.0, max_attempts=1)
    told = judge.judge(matches(1))[0].judgment["answer"]
    for sentence in (str(failed.value), told):
        assert "through the proxy 127.0.0.1:9 that HTTP_PROXY names" in sentence and "secret" not in sentence
