"""The preferences stage with several sources of rewards: the weighed sum, failures left out and counted, the
limit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import rlhf_core.stages.preferences.preferences_stage
import rlhf_core.stages.preferences.sample_answers
from rlhf_core.config import Preferences
from rlhf_core.config.kinds import has_metric
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.models.reward_scoring import STATISTICS, RewardScorer
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.rewards.reward_server import application
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer, Sampling
from rlhf_core.runs import awaited_servers
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.system.machine import Unreachable
from tests.support.asgi import served
from tests.support.chat_endpoint import SECRET, Reply, completion, serving
from tests.support.stage_request import stage_request
from tests.support.tiny_models import reward_model

ANSWERS = ("3", "44", "555", "6666")
FUNCTIONS = """
def length(responses): return [len(r) for r in responses]
def misspelt(responses): return [scor(r) for r in responses]
def no_threes(responses): return [None if "3" in r else float(len(r)) for r in responses]
def of_the_row(rows, query): return [row["worth"] + ("<|assistant|>6666" in text) for row, text in zip(rows, query)]
"""


class ScriptedSampler:
    """Answers ANSWERS in turn; each ends by itself."""

    def __init__(self, model: str, config: Any, **settings: Any):
        self.answers = [load_tokenizer(model)(text, add_special_tokens=False).input_ids for text in ANSWERS]

    def stream(
        self, prompts: list[list[int]], seeds: list[int], how: Sampling, pictures: Sequence[Pictures] = ()
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        for prompt in range(len(prompts)):
            yield (
                prompt,
                [SampledAnswer([*self.answers[i], how.stop_token_ids[0]], [], True) for i in range(how.n)],
            )

    def close(self) -> None:
        pass


def score(self: RewardScorer, documents: list[Document]) -> list[float]:
    """A reward model that counts the answer's tokens, its end included."""
    return [float(sum(document.mask)) for document in documents]


@pytest.fixture
def server() -> Iterator[str]:
    """A reward server that gives ten for each character."""
    with served(
        application(lambda requested: [10.0 * len(answer.response) for answer in requested], {})
    ) as url:
        yield url


@pytest.fixture
def run(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the stage on two prompts, four answers each; gives its outcome and the rows it wrote."""
    monkeypatch.setattr(rlhf_core.stages.preferences.sample_answers, "open_engine", ScriptedSampler)
    monkeypatch.setattr(RewardScorer, "score", score)
    (tmp_path / "code.py").write_text(FUNCTIONS)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} plus {i}", "worth": i}) + "\n" for i in range(2))
    )
    reward_model(material / "base", tmp_path / "rm")
    (tmp_path / "rm" / STATISTICS).write_text('{"mean": 1.0, "std": 2.0}')
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(reward: object, **fields: Any) -> tuple[Outcome, list[dict[str, Any]]]:
        config = Preferences(
            policy="base",
            reward=reward,
            prompts={"sources": str(tmp_path / "prompts.jsonl")},
            n_samples_per_prompt=4,
            prompt_max_len=64,
            generate_max_len=64,
            **{"post_processor": "conditional_sft", **fields},
        )
        inputs = {"base": str(material / "base"), "rm": str(tmp_path / "rm")}
        request = stage_request(config, inputs, name="x")
        outcome = rlhf_core.stages.preferences.preferences_stage.run(request, RunDir(tmp_path / "run"))
        assert [name for name in outcome.metrics if not has_metric(config, name)] == []
        written = next(path for name, path in outcome.outputs.items() if name != "data_report")
        return outcome, [json.loads(line) for line in (tmp_path / "run" / written).read_text().splitlines()]

    return run


def test_sources_are_standardised_weighed_and_summed(run: Any, server: str) -> None:
    outcome, rows = run(
        [
            {"model": "rm", "normalize": "stored", "weight": 0.5},
            {"function": "code.py:length", "normalize": "running", "weight": 2.0},
            {"url": server, "name": "server", "weight": 0.01},
            "code.py:of_the_row",
        ]
    )
    std = 1.25**0.5  # of 1, 2, 3, 4, whose mean is 2.5: the batch's own
    worth = {"0 plus 0": 0.0, "1 plus 1": 1.0}
    expected = {
        (prompt, text): (
            0.5 * (len(text) + 1 - 1.0) / 2.0
            + 2.0 * (len(text) - 2.5) / std
            + 0.01 * 10 * len(text)
            + own
            + (text == "6666")
        )
        for prompt, own in worth.items()
        for text in ANSWERS
    }
    found = {(row["prompt"][0]["content"], row["response"]): row["reward"] for row in rows}
    assert found == pytest.approx(expected, abs=1e-5)
    metrics = outcome.metrics
    assert metrics["reward/mean"] == pytest.approx(sum(expected.values()) / 8, abs=1e-5)
    assert metrics["reward/best"] == pytest.approx(
        sum(expected[prompt, "6666"] for prompt in worth) / 2, abs=1e-5
    )
    assert [
        metrics[f"reward/{name}/mean"] for name in ("rm", "length", "server", "of_the_row")
    ] == pytest.approx([3.5, 2.5, 25.0, 0.75])
    assert metrics["reward/failed"] == 0


def test_one_plain_reward_model_keeps_its_own_units(run: Any) -> None:
    outcome, rows = run("rm")
    assert [row["reward"] for row in rows] == [2.0, 3.0, 4.0, 5.0] * 2
    assert outcome.metrics["reward/mean"] == 3.5


def test_answers_that_a_source_failed_on_are_left_out_and_counted(run: Any) -> None:
    failing = {"function": "code.py:no_threes", "max_attempts": 1}
    outcome, rows = run(["rm", failing], max_failed_rewards=0.25)
    assert [row["response"] for row in rows] == ["44", "555", "6666"] * 2
    assert outcome.metrics["reward/no_threes/failed"] == outcome.metrics["reward/failed"] == 2
    assert outcome.metrics["reward/rm/failed"] == 0 and outcome.metrics["dropped/no_reward"] == 0
    assert outcome.metrics["reward/worst"] == 3 + 2, "the sum of both, of the answers that have one"
    _, pairs = run(["rm", failing], max_failed_rewards=0.25, post_processor="dpo")
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("6666", "44")] * 2


def test_above_the_limit_the_stage_stops_and_names_the_source(run: Any, tmp_path: Path) -> None:
    with pytest.raises(RewardsFailed, match=r"no_threes left 2 of 8 .* without a reward.*max_failed_rewards"):
        run(["rm", {"function": "code.py:no_threes", "max_attempts": 1}], max_failed_rewards=0.24)
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_min_reward_speaks_of_the_weighed_sum(run: Any) -> None:
    # the best answers sum to 10 + 0 + 1 and 10 + 1 + 1
    rewards = [{"model": "rm", "weight": 2.0}, "code.py:of_the_row"]
    outcome, rows = run(rewards, post_processor="rejection_sampling", min_reward=11.5)
    assert [(row["prompt"][0]["content"], row["reward"]) for row in rows] == [("1 plus 1", 12.0)]
    assert outcome.metrics["dropped/min_reward"] == 1


def test_missing_statistics_stop_the_stage_before_sampling(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rm" / STATISTICS).unlink()
    monkeypatch.setattr(ScriptedSampler, "stream", None)
    with pytest.raises(ValueError, match=r"has no score_statistics.json: set `normalize` .* running or none"):
        run([{"model": "rm", "normalize": "stored"}])


def test_ranks_of_a_reward_model_are_refused(run: Any) -> None:
    with pytest.raises(ValueError, match="rm runs in the stage's own process: leave out its ranks"):
        run([{"model": "rm", "ranks": {"cpus": 2}}])


def test_a_bug_in_a_reward_function_is_told_before_an_engine_starts(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlhf_core.stages.preferences.preferences_stage, "answers_of_round", pytest.fail)
    with pytest.raises(ValueError, match=r"misspelt: a call with a made-up .* NameError: .*code\.py, line 3"):
        run(["rm", "code.py:misspelt"])


@pytest.mark.usefixtures("judge_key")
def test_a_judge_of_known_taste_makes_the_pairs_and_is_paid_once(run: Any, tmp_path: Path) -> None:
    """It likes the digit 5, and forgets its verdict on the answer 3."""

    def taste(_: int, request: dict[str, Any]) -> Reply:
        answer = request["messages"][1]["content"].split("<<begin answer")[1].split("\n")[1]
        return completion("Well." if answer == "3" else f"[[{1 + answer.count('5')}]]")

    with serving(taste) as endpoint:
        judge = {"model": "taste", "base_url": endpoint.url, "api_key_env": "JUDGE_KEY"}
        reward = {"judge": judge, "rubric": "The digit 5.", "scale": [1, 4]}
        outcome, pairs = run(reward, post_processor="dpo", max_failed_rewards=0.25)
        assert [pair["chosen"] for pair in pairs] == ["555", "555"]
        assert {pair["rejected"] for pair in pairs} <= {"44", "6666"}
        assert outcome.metrics["reward/taste/failed"] == 2
        assert outcome.metrics["reward/taste/requests"] == len(endpoint.requests) == 2 * (3 + 2)
        assert outcome.metrics["reward/taste/mean"] == pytest.approx(1 / 3)
        again, _ = run(reward, post_processor="dpo", max_failed_rewards=0.25)
        assert again.metrics["reward/taste/requests"] == 2 * 2, "only the answers without a rating"
    written = "".join(file.read_text() for file in (tmp_path / "run").rglob("*.jsonl"))
    assert SECRET not in written and "[[4]]" in written


def test_a_missing_column_of_references_is_told_before_an_engine_starts(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlhf_core.stages.preferences.preferences_stage, "answers_of_round", pytest.fail)
    judge = {"model": "taste", "base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(
        ValueError,
        match=r"prompts: number 1: the reward taste finds no .* column 'gold'; .* are prompt, worth",
    ):
        run({"judge": judge, "rubric": "Right?", "reference": "gold"})


def test_a_silent_judge_is_told_before_an_engine_starts(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlhf_core.stages.preferences.preferences_stage, "answers_of_round", pytest.fail)
    monkeypatch.setattr(awaited_servers, "WAIT_SECONDS", 0.0)
    judge = {"model": "taste", "base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(Unreachable, match=r"the reward taste cannot reach http://127.0.0.1:9/v1 .*base_url"):
        run({"judge": judge, "rubric": "Right?"})


@pytest.mark.usefixtures("judge_key")
def test_a_judge_compares_the_answers_to_each_prompt(run: Any) -> None:
    """It likes the longer answer; of three pairs the second longest wins two."""

    def longer(_: int, request: dict[str, Any]) -> Reply:
        a, b = (
            request["messages"][1]["content"].split(f"<<begin answer {x}")[1].split("\n")[1] for x in "AB"
        )
        return completion("[[A>B]]" if len(a) > len(b) else "[[B>A]]")

    with serving(longer) as endpoint:
        judge = {"model": "taste", "base_url": endpoint.url, "api_key_env": "JUDGE_KEY"}
        outcome, rows = run({"judge": judge, "rubric": "Length.", "compare": "group"})
    assert [row["reward"] for row in rows] == pytest.approx([0, 1 / 3, 2 / 3, 1] * 2)
    assert outcome.metrics["reward/taste/requests"] == 2 * 6 * 2


def test_sources_are_standardised_among_the_answers_to_one_prompt(run: Any) -> None:
    """The rows' own worth moves all rewards of a prompt, and so none."""
    sources = [{"function": f"code.py:{name}", "normalize": "group"} for name in ("length", "of_the_row")]
    _, rows = run(sources, post_processor="kto")
    std = (5 / 3) ** 0.5  # of 1, 2, 3, 4, and 0.5 of w, w, w, w + 1
    of_texts = {text: (len(text) - 2.5) / std + ((text == "6666") - 0.25) / 0.5 for text in ANSWERS}
    expected = {("0 plus 0", text): value for text, value in of_texts.items()}
    expected |= {("1 plus 1", text): value for text, value in of_texts.items()}
    found = {(row["prompt"][0]["content"], row["response"]): row["reward"] for row in rows}
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_row_that_a_verifier_cannot_read_ends_the_stage_before_an_engine_starts(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("math_verify", reason="needs math-verify: make setup")
    monkeypatch.setattr(rlhf_core.stages.preferences.sample_answers, "open_engine", None)
    with pytest.raises(ValueError, match="prompts: number 1: the verifier math cannot read this row"):
        run({"verifier": "math", "answer": "known"})


def test_a_verifier_rewards_the_answers_of_a_stage(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="needs math-verify: make setup")
    rows = [{"prompt": "a", "answer": "44.0"}, {"prompt": "b", "answer": r"\boxed{555}"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome, written = run("math")
    right = {(row["prompt"][0]["content"], row["response"]) for row in written if row["reward"] == 1}
    assert right == {("a", "44"), ("b", "555")}
    assert outcome.metrics["reward/math/mean"] == 0.25 and outcome.metrics["reward/failed"] == 0
