"""One-step-off-policy pipelining: what is refused, the order of an iteration, the age of answers, and answers
that wait through a kill.

The fleet is a double whose engines hold a number for weights and answer by it; the loop, the states and the
credit are real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlhf_core.cluster.work_log import GroupWork
from rlhf_core.config import PPO, Data
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from rlhf_core.stages.ppo import train
from rlhf_core.stages.ppo.measured.probe import Probe
from rlhf_core.stages.ppo.roles.trained import Steps, Update
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores
from rlhf_core.stages.ppo.sampling.rollout_group import SeededPrompt, rollout
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled
from rlhf_core.stages.ppo.sampling.stored import AHEAD, read_ahead, write_ahead
from tests.support.stage_request import stage_request
from tests.support.states import wait_until_complete
from tests.support.text_rows import rows_of_text

SIZES = dict(rollout_batch_size=8, train_batch_size=8, micro_train_batch_size=8, n_samples_per_prompt=2)
STEP = 0.25  # nats that an update moves the log-prob of any token by


class Fleet:
    """Actor and engines whose weights are the number of updates; a token's log-prob under weights w is -1 -
    STEP w.

    An answer's last token but one names the weights that gave it.
    """

    sleeps = False
    zero_stage = 3

    def __init__(self, killed_at: int | None):
        self.killed_at = killed_at
        self.actor = self.engine = 0
        self.said: list[str] = []
        # weights of actor and of engines, tokens of the answers scored
        self.batches: list[tuple[int, int, list[list[int]]]] = []
        self.weights: list[float] = []
        # weights of actor and of engines, whether they were synced
        self.probed: list[tuple[int, int, bool]] = []

    def close(self) -> None: ...

    def decode(self, tokens: Sequence[int], skip: bool) -> str:
        return str(tokens)

    token_texts = None

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        return list(range(1, 1 + len(tokens)))

    def trained_parameters(self) -> int:
        return 1

    @property
    def engines(self) -> Fleet:
        return self

    def start_rollouts(
        self, seeded: Sequence[SeededPrompt], sampling: Sampling
    ) -> Callable[[], list[Rollout]]:
        weights = self.engine
        logprob = -1 - STEP * self.engine
        self.said.append(f"start {weights}")

        def wait() -> list[Rollout]:
            self.said.append("answers")
            assert self.engine == weights, "weights may not change while engines answer"
            return [
                rollout(prompt, SampledAnswer([1 + seed % 5, 2 + weights, 1], [logprob] * 3, seed % 3 > 0))
                for prompt, seed in seeded
                for _ in range(sampling.n)
            ]

        return wait

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed: int
    ) -> Callable[[], Scores]:
        self.said.append("score")
        tokens = [rollout.document.tokens for rollout in rollouts]
        self.batches.append((self.actor, tokens[0][-2] - 2, tokens))
        logprobs = [
            np.where(rollout.document.mask, -1 - STEP * self.actor, 0).astype(np.float32)
            for rollout in rollouts
        ]
        return lambda: Scores(
            logprobs, logprobs, logprobs, Rewards({"reward_model": np.arange(len(rollouts), dtype=float)}, {})
        )

    def train(
        self,
        experience: Sequence[Experience],
        updates: Mapping[str, Sequence[Update]],
        beside: Callable[[], None],
        stored: Sequence[Any],
    ) -> Steps:
        beside()
        self.said.append("train")
        if "actor" in updates:
            self.actor += 1
        if self.actor == self.killed_at:
            wait_until_complete()
            raise KeyboardInterrupt
        assert experience[0].old_logprobs is not None
        self.weights.append(
            float(np.exp(experience[0].old_logprobs[-1] - experience[0].sampler_logprobs[-1]))
        )
        return Steps([{"policy/ratio": 1.0, "policy/ratio_gap": 0.0}], [])

    def sync_weights(self, version: int = 0) -> None:
        self.said.append("publish")
        self.engine = self.actor

    def probe(self, documents: Sequence[Document], synced: bool = True) -> Probe:
        self.probed.append((self.actor, self.engine, synced))
        return Probe(0.0, 0.0)

    @property
    def gpus(self) -> dict[str, list[str]]:
        return {}

    def take_work(self) -> dict[str, GroupWork]:
        return {}

    def iteration_metrics(self, *of: object) -> dict[str, float]:
        return {}

    def save_state(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.actor))

    def state_files(self) -> list[str]:
        return ["weights"]

    def finish_saving(self) -> None: ...

    def load_state(self, folder: Path) -> None:
        self.actor = int((folder / "weights").read_text())

    def try_export(self, folder: Path) -> None: ...

    def export_actor(self, folder: Path) -> None:
        folder.mkdir(parents=True)


def ppo(
    material: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch, killed_at: int | None = None, **config: Any
) -> Fleet:
    """Runs the stage of five iterations, or to its kill in update `killed_at`."""
    fleet = Fleet(killed_at)
    with monkeypatch.context() as patch:
        patch.setattr(train, "start_fleet", lambda *_: fleet)
        prompts = Data.model_validate({"sources": str(material / "prompts.jsonl"), "max_samples": 40})
        requested = PPO(prompts=prompts, prompt_max_len=48, generate_max_len=24, **{**SIZES, **config})
        inputs = dict.fromkeys(("sft", "reward_model"), str(material / "base"))
        run.prepare(stage_request(requested, inputs))
        try:
            run_in_directory(
                run.path,
                lambda request, run: train.train(request, run, dict.fromkeys(("actor", "sampler")), 0.0),
            )
        except KeyboardInterrupt:
            assert killed_at is not None
    lines = read_metrics(run.path)
    assert [
        name for name in lines[-1] if name not in ("step", "time") and not has_metric(requested, name)
    ] == []
    return fleet


def config(**fields: Any) -> PPO:
    return PPO(prompts=Data(sources="p.jsonl"), **{**SIZES, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    rows_of_text("""
    {colocate_all: true} | trains while engines generate, so they need GPUs of their own: leave out colocate_all and engine.sleep
    {engine: {gpus: 1, sleep: true}} | they need GPUs of their own: leave out colocate_all and engine.sleep
    {stream_batch_size: 4} | nothing can be streamed: leave out stream_batch_size
    {sampler_is: 'off'} | set sampler_is to truncate or clamp
    {dynamic_filtering: true, engine: {kind: transformers}} | max_staleness with dynamic_filtering changes weights between two tokens .* set max_staleness to 0
    {dynamic_filtering: true, colocate_critic_reward: true} | scores answers while the critic trains, so .* leave out colocate_critic_reward
    """),
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        config(max_staleness=1, **fields)
    config(**fields)
    assert config(max_staleness=1, sampler_is="clamp").max_staleness


def test_engines_answer_the_next_prompts_while_models_work(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = ppo(material, RunDir(tmp_path / "run"), monkeypatch, max_staleness=1, max_steps=4)
    middle = ["score", "train", "answers", "publish"]
    assert fleet.said == [
        "start 0",
        "answers",
        "start 0",
        *middle,
        "start 1",
        *middle,
        "start 2",
        *middle,
        "score",
        "train",
        "publish",
    ]
    turns = ppo(material, RunDir(tmp_path / "turns"), monkeypatch, max_steps=4)
    assert turns.said == [
        said for k in range(4) for said in (f"start {k}", "answers", "score", "train", "publish")
    ]


def test_answers_are_one_update_old_and_their_weights_say_so(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = ppo(material, RunDir(tmp_path / "run"), monkeypatch, max_staleness=1)
    assert [(actor, engine) for actor, engine, _ in fleet.batches] == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]
    lines = read_metrics(tmp_path / "run")
    assert [line["rollout/age"] for line in lines] == [0, 1, 1, 1, 1]
    assert [line["sampler/gap"] for line in lines] == pytest.approx([0, STEP, STEP, STEP, STEP])
    assert fleet.weights == pytest.approx([1, *[np.exp(-STEP)] * 4]), "trainer's over sampler's probability"
    assert all(line["phase/generate"] >= 0 for line in lines)


def test_prompts_come_in_the_same_order_as_without(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, turns = (ppo(material, RunDir(tmp_path / str(on)), monkeypatch, max_staleness=on) for on in (1, 0))
    assert [[t[:-2] for t in tokens] for *_, tokens in ahead.batches] == [
        [t[:-2] for t in tokens] for *_, tokens in turns.batches
    ]
    assert "rollout/age" not in read_metrics(tmp_path / "0")[-1]


def test_while_the_actor_rests_no_answer_is_old(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = ppo(material, RunDir(tmp_path / "run"), monkeypatch, max_staleness=1, freezing_actor_steps=2)
    assert [line["rollout/age"] for line in read_metrics(tmp_path / "run")] == [0, 0, 0, 1, 1]
    assert [(actor, engine) for actor, engine, _ in fleet.batches] == [(0, 0), (0, 0), (0, 0), (1, 0), (2, 1)]


@pytest.mark.parametrize("killed_at", [2, 3, 4, 5])
def test_a_killed_run_trains_on_the_same_answers(
    killed_at: int, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"max_staleness": 1, "save_steps": 2}
    whole = ppo(material, RunDir(tmp_path / "whole"), monkeypatch, **how)
    cut_off = ppo(material, RunDir(tmp_path / "run"), monkeypatch, killed_at, **how)
    again = ppo(material, RunDir(tmp_path / "run"), monkeypatch, **how)
    saved = (killed_at - 1) // 2 * 2
    assert cut_off.batches == whole.batches[:killed_at] and again.batches == whole.batches[saved:]
    assert again.said[0] == ("publish" if saved else "start 0"), "answers that waited are not sampled again"

    def curve(name: str) -> list[dict[str, float]]:
        return [
            {k: v for k, v in line.items() if k != "time" and "phase/" not in k}
            for line in read_metrics(tmp_path / name)
        ]

    assert curve("run") == curve("whole")


def test_a_resumed_run_probes_the_engine_before_and_after_the_first_sync(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for killed_at in (3, None):
        fleet = ppo(material, RunDir(tmp_path), monkeypatch, killed_at, save_steps=2)
        assert fleet.probed[0] == (0, 0, False), "on what both have loaded"
        assert fleet.probed[1] == ((2, 2, True) if killed_at is None else (1, 1, True))


def test_answers_wait_on_disk_bit_for_bit(tmp_path: Path) -> None:
    order = PromptOrder([Prompt((), [i, 7], {}, False) for i in range(10)], 4, seed=3)
    generator = np.random.default_rng(0)
    prompts = [prompt for prompt, _ in order.take(8, 4) for _ in range(2)]
    found = [
        rollout(p, SampledAnswer([5, 6, i], generator.normal(size=3).tolist(), i % 2 == 0))
        for i, p in enumerate(prompts)
    ]
    assert read_ahead(tmp_path, order, 2) is None
    write_ahead(tmp_path, Sampled(found, None, 12, {}, age=1))
    back = read_ahead(tmp_path, order, 2)
    assert back is not None and (back.position, back.age, back.rewards, back.metrics) == (12, 1, None, {})
    for was, now in zip(found, back.rollouts, strict=True):
        assert (now.prompt, now.document, now.finished) == (was.prompt, was.document, was.finished)
        assert now.sampler_logprobs.dtype == np.float32
        assert now.sampler_logprobs.tobytes() == was.sampler_logprobs.tobytes()
    (tmp_path / AHEAD).write_text("\n".join((tmp_path / AHEAD).read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match="shorter"):
        read_ahead(tmp_path, order, 2)
