"""GRPO on Ray and vLLM with sources of rewards of each kind: two reward models, a Python function, a reward
server, a judge that compares.

One of the reward models has another tokenizer than the actor. The actor is a hybrid model, with a layer that
keeps a state from token to token (Mamba 2) and one with attention.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flows.cli.results.artifacts import REWARD_KEY
from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.rewards.reward_server import AnswerToScore, document
from rlhf_core.rewards.reward_trial import ANSWER
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.chat_endpoint import SECRET, Reply, completion, serving
from tests.support.families import make_family
from tests.support.sockets import beyond_loopback, listening
from tests.support.stage_request import stage_request
from tests.support.stage_work import train_reward_model
from tests.unit.rewards.test_own_tokens import save_twin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ITERATIONS = 3
FUNCTION = """
import json, pathlib

def short(prompts, responses, finished):
    '''Fewer characters are better; the second answer of each request has no reward. Keeps its requests.'''
    with pathlib.Path(__file__).with_name("requests.jsonl").open("a") as file:
        file.write(json.dumps([prompts, responses, finished]) + "\\n")
    return [None if i == 1 else -len(r) / 10 - (not done) for i, (r, done) in enumerate(zip(responses, finished, strict=True))]
"""


def longer(_: int, request: dict[str, Any]) -> Reply:
    """A judge that prefers the longer answer."""
    text = request["messages"][1]["content"]
    a, b = (
        re.findall(rf"<<begin answer {x} \w+>>\n(.*)\n<<end answer {x}", text, re.DOTALL)[0] for x in "AB"
    )
    return completion("[[A>B]]" if len(a) > len(b) else "[[A=B]]" if len(a) == len(b) else "[[B>A]]")


@pytest.fixture(scope="module")
def run(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    train_reward_model(material, root / "rm", 64)
    (root / "checks").mkdir()
    (root / "checks" / "checks.py").write_text(FUNCTION)
    served = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "flows.cli",
            "serve-reward",
            str(root / "rm" / "checkpoint"),
            "--port",
            "0",
            "--home",
            str(root / "home"),
        ],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != REWARD_KEY},
        text=True,
    )
    with ExitStack() as stack:
        stack.callback(served.wait, 100)
        stack.callback(served.terminate)
        judge = stack.enter_context(serving(longer))
        assert served.stdout is not None
        line = served.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address, f"the server said {line!r}"
        check_its_protection(address[0], root / "home" / "reward-key", served)
        share = Ranks(cpus=0.25)
        config = PPO(
            actor="base",
            advantage_estimator="grpo",
            kl_in="loss",
            kl_estimator="k3",
            init_kl_coef=0.1,
            reward=(
                {"model": "reward_model", "normalize": "running"},
                {
                    "function": f"{root / 'checks' / 'checks.py'}:short",
                    "weight": 0.5,
                    "max_attempts": 1,
                    "batch_size": 16,
                },
                dict(url=address[0], name="server", weight=0.25, batch_size=4, api_key_env=REWARD_KEY),
                {"model": "twin", "weight": 0.1},
                {
                    "judge": {"model": "taste", "base_url": judge.url, "api_key_env": "JUDGE_KEY"},
                    "rubric": "Length.",
                    "compare": "group",
                    "pairs_per_answer": 2,
                    "weight": 0.1,
                },
            ),
            max_failed_rewards=0.1,
            prompts=Data(sources=str(material / "prompts.jsonl")),
            rollout_batch_size=4,
            n_samples_per_prompt=4,
            train_batch_size=8,
            micro_train_batch_size=8,
            max_steps=ITERATIONS,
            prompt_max_len=64,
            generate_max_len=16,
            actor_learning_rate=1e-3,
            timeout=200,
            actor_ranks=share,
            reference_ranks=share,
            reward_ranks=share,
            engine=EngineConfig(cpus=0.25, kv_cache_gib=0.5),
        )
        actor = make_family("granite-hybrid", material / "base", root / "actor")
        inputs = {"base": str(actor), "reward_model": str(root / "rm" / "checkpoint")}
        inputs["twin"] = str(save_twin(root / "rm" / "checkpoint", root / "twin"))
        RunDir(root / "grpo").prepare(stage_request(config, inputs, name="grpo", seed=7))
        with (root / "log.txt").open("wb") as log:
            command = [sys.executable, "-m", "rlhf_core", str(root / "grpo")]
            environment = os.environ | {REWARD_KEY: (root / "home" / "reward-key").read_text().strip()}
            environment |= {"JUDGE_KEY": SECRET, "NO_PROXY": "127.0.0.1"}
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=900
            ).returncode
        assert code == 0, (root / "log.txt").read_text()[-3000:]
        (root / "judged.json").write_text(json.dumps(judge.requests))
    return root


def check_its_protection(address: str, place: Path, served: subprocess.Popen[str]) -> None:
    """Strangers are refused; the key is in a file of its owner alone."""
    key = place.read_text().strip()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600 and len(key) > 40
    assert served.stdout is not None and str(place) in served.stdout.readline()
    body = {"prompts": ["1 + 1"], "responses": ["2"]}
    own = {"Authorization": f"Bearer {key}"}
    assert httpx.post(address, json=body).status_code == 401
    # DNS rebinding
    assert httpx.post(address, json=body, headers=own | {"Host": "evil.example"}).status_code == 400
    assert httpx.post(address, json=body, headers=own | {"Origin": "http://evil.example"}).status_code == 403
    assert httpx.post(address, json=body, headers=own).status_code == 200
    assert listening(served.pid) and not beyond_loopback(served.pid)


def test_all_sources_are_summed(run: Path) -> None:
    """What each source said is what it says of the texts of the requests to the function; the first one has
    made-up answers."""
    lines = read_metrics(run / "grpo")
    made_up, *requests = (run / "checks" / "requests.jsonl").read_text().splitlines()
    assert ANSWER in made_up and not any(ANSWER in request for request in requests)
    assert len(lines) == len(requests) == ITERATIONS
    checkpoint = str(run / "rm" / "checkpoint")
    renderer = Renderer(load_tokenizer(checkpoint), "chat")
    scorer = RewardScorer(checkpoint, "float32", 16)
    for line, texts in zip(lines, map(json.loads, requests), strict=True):
        answers = [AnswerToScore(*each) for each in zip(*texts, strict=True)]
        served = np.array(scorer.score([document(renderer, answer) for answer in answers]))
        short = np.array([-len(answer.response) / 10 - (not answer.finished) for answer in answers])
        counted = np.arange(len(answers)) != 1
        assert line["reward/server/mean"] == pytest.approx(served.mean(), abs=1e-5)
        assert line["reward/server/std"] == pytest.approx(served.std(), abs=1e-5)
        assert line["reward/twin/mean"] == pytest.approx(served.mean(), abs=1e-5), "in tokens of its own"
        assert line["reward/short/mean"] == pytest.approx(short[counted].mean(), abs=1e-5)
        assert math.isfinite(line["reward/mean"])


def test_a_judge_compares_the_answers_to_each_prompt(run: Path) -> None:
    lines = read_metrics(run / "grpo")
    asked = json.loads((run / "judged.json").read_text())
    assert sum(line["reward/taste/requests"] for line in lines) == len(asked) > 0
    for line in lines:
        assert line["reward/taste/mean"] == pytest.approx(0.5) and line["reward/taste/failed"] == 0
        assert line["reward/taste/requests"] <= 4 * 4 * 2, "4 prompts with 4 pairs, in both orders"
    assert any(line["reward/taste/std"] > 0 for line in lines)
    assert len((run / "grpo" / "judge_cache" / "taste.jsonl").read_text().splitlines()) == len(asked)
    files = [
        file for folder in ("grpo", "log.txt") for file in [run / folder, *(run / folder).rglob("*.json*")]
    ]
    assert not any(SECRET in file.read_text() for file in files if file.is_file())


def test_failures_are_counted_and_masked(run: Path) -> None:
    for line in read_metrics(run / "grpo"):
        assert line["reward/short/failed"] == 1
        assert line["reward/server/failed"] == 0
        assert line["reward/reward_model/failed"] == 0
        assert line["rollout/usable"] == 15 / 16


def test_there_was_no_critic_and_the_actor_learned_on_policy(run: Path) -> None:
    assert "waiting for critic" not in (run / "log.txt").read_text()
    lines = read_metrics(run / "grpo")
    assert not any(name.startswith("value/") for line in lines for name in line)
    assert lines[0]["kl/mean"] == pytest.approx(0, abs=1e-5) and lines[-1]["policy/kl_loss"] > 0
    for line in lines:
        assert line["policy/first_ratio_gap"] < 1e-5
        assert line["sampler/gap_p99"] < 1e-2 and line["sync/probe_gap"] < 1e-3
    before, after = (
        load_file(folder / "model.safetensors") for folder in (run / "actor", run / "grpo" / "checkpoint")
    )
    assert after.keys() == before.keys() and any(".mamba." in name for name in after)
    assert all(torch.isfinite(weight).all() for weight in after.values())
    assert all(not torch.equal(after[name], before[name]) for name in after if name.endswith("proj.weight"))
