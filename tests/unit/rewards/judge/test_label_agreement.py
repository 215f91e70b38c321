"""A judge is held against labelled pairs before it rewards: the share on which it agrees, and the limit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.mean_interval import mean_interval
from rlhf_core.rewards.judge.label_agreement import agreed, agreement_metrics
from rlhf_core.rewards.reward_contract import RewardsFailed
from tests.support.chat_endpoint import Endpoint, Reply, completion, serving

pytestmark = pytest.mark.usefixtures("judge_key")
# of a judge that likes the letter e: agrees, agrees, tie, disagrees
PAIRS = [("eee", "b"), ("ee", "e"), ("a", "b"), ("a", "ee")]


def taste(_: int, request: dict[str, Any]) -> Reply:
    texts = re.findall(r"<<begin answer.*?>>\n(.*?)\n<<end", request["messages"][1]["content"], re.DOTALL)
    counts = [text.count("e") for text in texts]
    if len(counts) == 1:
        return completion("what?" if "?" in texts[0] else f"[[{1 + counts[0]}]]")
    return completion(
        "[[A>B]]" if counts[0] > counts[1] else "[[A=B]]" if len(set(counts)) < 2 else "[[B>A]]"
    )


Check = Callable[..., tuple[dict[str, float], Endpoint]]


@pytest.fixture
def checked(tmp_path: Path) -> Check:
    """Holds the judge against pairs. Returns the metrics and the endpoint."""

    def run(
        pairs: list[tuple[str, str]], max_failed: float = 0.0, labels: Any = None, **fields: Any
    ) -> tuple[dict[str, float], Endpoint]:
        rows = [{"prompt": "Name a tree.", "chosen": a, "rejected": b, "gold": "e"} for a, b in pairs]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with serving(taste) as endpoint:
            judge = {"model": "taste", "base_url": endpoint.url, "api_key_env": "JUDGE_KEY"}
            agreement = {"data": str(tmp_path / "pairs.jsonl"), "min": 0.5, **(labels or {})}
            source = JudgeReward(judge=judge, rubric="e?", agreement=agreement, **fields)
            return agreement_metrics([source], max_failed, tmp_path / "cache", 0), endpoint

    return run


@pytest.mark.parametrize(
    ("fields", "requests"),
    [({}, 5), ({"compare": "group"}, 8), ({"compare": "reference", "reference": "gold"}, 8)],
    ids=["rating", "group", "reference"],
)
def test_the_share_counts_ties_half_and_has_its_interval(
    checked: Check, fields: dict[str, Any], requests: int
) -> None:
    metrics, endpoint = checked(PAIRS, **fields)
    points = np.array([1, 1, 0.5, 0])
    low, high = mean_interval(points, np.ones(4))
    assert metrics == pytest.approx(
        {
            "judge/taste/agreement": 0.625,
            "judge/taste/agreement/ci_low": low,
            "judge/taste/agreement/ci_high": high,
            "judge/taste/pairs": 4,
        }
    )
    assert len(endpoint.requests) == requests, "equal requests are sent once"
    assert checked(PAIRS, **fields)[1].requests == [], "verdicts are kept"


def test_below_the_minimum_the_stage_stops_with_the_numbers(checked: Check) -> None:
    with pytest.raises(
        ValueError,
        match=r"the judge taste agrees with .*pairs.jsonl on 0.625 of 4 pairs .*less than min=0.63",
    ):
        checked(PAIRS, labels={"min": 0.63})
    assert checked(PAIRS, labels={"min": 0.625})[0]["judge/taste/agreement"] == 0.625


def test_limit_takes_the_first_pairs_and_equal_answers_do_not_count(checked: Check) -> None:
    assert checked(PAIRS, labels={"limit": 2})[0]["judge/taste/pairs"] == 2
    assert checked([("a", "a"), *PAIRS])[0]["judge/taste/pairs"] == 4
    with pytest.raises(ValueError, match="no pair of different answers"):
        checked([("a", "a")])


def test_pairs_that_the_judge_failed_on_do_not_count_up_to_the_limit(checked: Check) -> None:
    pairs = [*PAIRS, ("e?", "b")]
    assert checked(pairs, max_failed=0.1)[0]["judge/taste/pairs"] == 4
    with pytest.raises(RewardsFailed, match="taste left 1 of 10 answers without a reward"):
        checked(pairs, max_failed=0.09)
    with pytest.raises(RewardsFailed, match="judged none of the pairs"):
        checked([("e?", "b")], max_failed=1.0)


def test_a_judge_without_labels_is_not_asked() -> None:
    assert agreement_metrics([JudgeReward(judge={"model": "m"}, rubric="r")], 0.0, None, 0) == {}


def test_points_at_the_edges() -> None:
    rewards = np.array([[1, 0], [0, 1], [0.5, 0.5], [1e-12, 0]])
    assert agreed(rewards).tolist() == [1, 0, 0.5, 1]


def test_an_inbox_is_refused() -> None:
    with pytest.raises(ValueError, match="is an inbox, but a judge is checked against a fixed set of pairs"):
        JudgeReward(judge={"model": "m"}, rubric="r", agreement={"data": "a.inbox"})
