"""What is recorded of an iteration's answers for readers is what training used."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers.decoders import DecodeStream

from rlhf_core.config import PPO
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document, Prompt, compact
from rlhf_core.rewards.clients import Rewards
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo import token_records as records_module
from rlhf_core.stages.ppo.iteration import Carried, Iteration, ppo_iteration
from rlhf_core.stages.ppo.iteration_loop import IterationLoop
from rlhf_core.stages.ppo.ppo_setup import schedule_of, setup_of
from rlhf_core.stages.ppo.rewards import texts as texts_module
from rlhf_core.stages.ppo.rewards.credit import Credited, credit
from rlhf_core.stages.ppo.rewards.texts import TokenTexts, token_texts_of
from rlhf_core.stages.ppo.roles.role_passes import on_tokens
from rlhf_core.stages.ppo.rollout_records import Own, Rollout, Scores
from rlhf_core.stages.ppo.token_records import (
    ANSWERS,
    TokenRecord,
    chosen_answers,
    readable,
    shortest,
    token_records,
)
from tests.support.recorded_rollout import OLD, REFERENCE, SAMPLER, TERMS, VALUES, answers, arrays, close, ppo
from tests.unit.stages.ppo.test_kept_rollouts import setup
from tests.unit.stages.ppo.test_ppo_sampling import PROMPTS, Fleet, config


def texts_of(tokens: Sequence[int]) -> TokenTexts:
    """Token 0 is special."""
    return TokenTexts([f"<{token}>" for token in tokens], [i for i, token in enumerate(tokens) if token == 0])


def recorded(
    requested: PPO, rewards: Sequence[float], logprobs: bool = True, **given: Any
) -> tuple[Credited, dict[int, TokenRecord], list[Rollout]]:
    """The recorded rollout's credit and records. `logprobs`: the actor scored before it trained."""
    rollouts = answers()
    scores = Scores(
        arrays(OLD) if logprobs else None,
        arrays(REFERENCE),
        arrays(VALUES) if requested.has_critic else None,
        Rewards({"model": np.array(rewards)}, {}),
    )
    credited = credit(rollouts, scores, 0.1, {}, requested, TERMS)
    options: dict[str, Any] = {"of_training": [], "age": 0, "version": None, **given}
    return credited, token_records(rollouts, scores, credited, config=requested, **options), rollouts


def test_the_numbers_of_tokens_are_those_of_training() -> None:
    credited, records, rollouts = recorded(ppo(), [2.0, -1.0])
    assert list(records) == [0, 1]
    for i, record in records.items():
        experience = credited.experience[i]
        mask = rollouts[i].document.mask_array
        assert isinstance(experience.advantages, np.ndarray)
        np.testing.assert_array_equal(record.advantages, experience.advantages[mask])
        np.testing.assert_array_equal(record.trainer, np.array(OLD[i], np.float32)[mask])
        np.testing.assert_array_equal(record.reference, np.array(REFERENCE[i], np.float32)[mask])
        assert record.trained and record.left_out is None and record.ages == (0, 0)
    assert len(records[0].advantages) == 3 and len(records[1].advantages) == 2
    # k1: 0.5 + 0 - 1, and -0.5 + 0
    assert records[0].reward == close({"sum": 2.0, "clipped": 2.0, "shaped": 2.0, "kl": -0.5, "kl_coef": 0.1})
    assert records[1].reward["kl"] == close(-0.5) and records[1].reward["shaped"] == -1.0


def test_later_changes_of_the_arrays_do_not_reach_the_records() -> None:
    credited, records, _ = recorded(ppo(), [2.0, -1.0])
    before = records[0].advantages.copy()
    credited.experience[0].advantages[:] = 9  # type: ignore[index]
    np.testing.assert_array_equal(records[0].advantages, before)


def test_one_number_for_an_answer_is_that_of_each_token() -> None:
    credited, records, _ = recorded(ppo(advantage_estimator="grpo", init_kl_coef=0.0), [2.0, -1.0])
    for i, record in records.items():
        assert record.advantages.tolist() == close([credited.experience[i].advantages] * (3 - i))
    assert records[0].advantages[0] > 0 > records[1].advantages[0]


def test_a_group_without_a_signal_has_no_advantage() -> None:
    _, records, rollouts = recorded(ppo(advantage_estimator="grpo", init_kl_coef=0.0), [0.5, 0.5])
    assert all(not record.advantages.any() and record.trained for record in records.values())
    rows = list(readable(rollouts, Rewards({"model": np.array([0.5, 0.5])}, {}), records, said, texts_of))
    assert [row["tokens"]["advantages"] for row in rows] == [[0.0] * 3, [0.0] * 2]


def said(tokens: Sequence[int], skip: bool) -> str:
    return " ".join(map(str, tokens))


def test_an_answer_without_a_reward_is_not_trained_on() -> None:
    _, records, rollouts = recorded(ppo(), [2.0, math.nan])
    assert records[0].trained and not records[1].trained
    assert records[1].reward.keys() == {"kl", "kl_coef"}
    rewards = Rewards({"model": np.array([2.0, math.nan])}, {})
    rows = list(readable(rollouts, rewards, records, said, texts_of))
    assert rows[1]["rewards"] == {"model": None} and rows[1]["trained"] is False
    json.loads(json.dumps(rows, allow_nan=False))


def test_truncated_answers_that_are_masked_and_penalties_are_named() -> None:
    requested = ppo(mask_truncated=True, truncated_penalty=0.25)
    _, records, rollouts = recorded(requested, [2.0, -1.0])
    assert [record.trained for record in records.values()] == [False, True]
    assert records[0].reward == close(
        {"sum": 2.0, "clipped": 2.0, "truncated": -0.25, "shaped": 1.75, "kl": -0.5, "kl_coef": 0.1}
    )
    assert list(records[0].reward)[:4] == ["sum", "clipped", "truncated", "shaped"]
    rows = list(readable(rollouts, Rewards({"model": np.zeros(2)}, {}), records, said, texts_of))
    assert [row["ended_by"] for row in rows] == ["tokens", None]


def test_log_probs_of_the_training_pass_stand_for_those_before_it() -> None:
    """Only answers of the first optimiser step have them."""
    passes = [(1, arrays(OLD)[1])]
    for requested in (ppo(sampler_is="in_ratio"), ppo(advantage_estimator="grpo", init_kl_coef=0.0)):
        before = requested.sampler_is == "in_ratio"  # the sampler's are then the old policy
        _, records, _ = recorded(requested, [2.0, -1.0], logprobs=before, of_training=passes)
        assert records[0].trainer is None
        np.testing.assert_array_equal(records[1].trainer, np.array(OLD[1][1:], np.float32))


def test_tokens_that_the_weights_mask_are_named() -> None:
    bounds = {"sampler_is": "mask", "sampler_is_clamp": (0.75, 3.0)}
    _, records, _ = recorded(ppo(**bounds), [2.0, -1.0])
    # weights 1, 4, 1 and 0.5, 1
    assert records[0].left_out is not None and records[0].left_out.tolist() == [False, True, False]
    assert records[1].left_out is not None and records[1].left_out.tolist() == [True, False]


def test_ages_of_answers() -> None:
    requested = ppo()
    _, ahead, _ = recorded(requested, [2.0, -1.0], age=1)
    assert ahead[0].ages == (1, 1)
    _, kept, _ = recorded(requested, [2.0, -1.0], age=None)
    assert kept[0].ages is None
    document = compact([7], [1, 2, 3])
    rollout = Rollout(PROMPTS[0], document, np.zeros(4, np.float32), True, versions=[(1, 3), (3, 5)])
    assert records_module.ages_of(rollout, 0, 5) == (0, 2)
    empty = Rollout(PROMPTS[0], compact([7], []), np.zeros(1, np.float32), True, versions=[(1, 3)])
    assert records_module.ages_of(empty, 0, 5) is None


def test_rows_hold_all_tokens_and_their_borders() -> None:
    """An episode: two answers, between them a message of a tool."""
    document = Document([7, 8, 1, 0, 9, 2, 0], [False, False, True, True, False, True, True])
    logprobs = np.array([0, 0, -0.1, -0.2, 0, -1 / 3, -0.4], np.float32)
    own = Own(1.0, None, "", 2, 1, 0.1, ended_by="turns")
    prompt = Prompt(({"role": "user", "content": "x"},), [7, 8], {"n": 1}, True)
    talk = (*prompt.messages, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"})
    rollout = Rollout(prompt, document, logprobs, False, talk, own)
    values = np.array([0.5, np.nan, -0.5, 1.5], np.float32)
    record = TokenRecord(values, logprobs[[2, 3, 5, 6]] + 1, None, None, True, {"sum": np.inf}, (1, 2))
    rewards = Rewards({"environment": np.array([1.0])}, {})
    (row,) = readable([rollout], rewards, {0: record}, said, texts_of)
    row = json.loads(json.dumps(row, allow_nan=False))
    assert next(iter(row)) == "row", "it is looked for at the start of a line"
    assert row["answer"] == 1 and row["prompt_messages"] == 1 and row["prompt_cut"]
    assert row["ended_by"] == "turns" and row["ages"] == [1, 2] and row["reward"] == {"sum": None}
    tokens = row["tokens"]
    assert tokens["ids"] == [7, 8, 1, 0, 9, 2, 0] and tokens["texts"][0] == "<7>"
    assert tokens["special"] == [3, 6] and tokens["answers"] == [2, 4, 5, 7] and tokens["starts"] == []
    assert tokens["advantages"] == [0.5, None, -0.5, 1.5] and "reference" not in tokens
    assert np.array(tokens["engine"], np.float32).tolist() == logprobs[[2, 3, 5, 6]].tolist()
    assert (tokens["total"], tokens["sampled"]) == (7, 4)


def test_long_answers_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_TOKENS", 3)
    _, records, rollouts = recorded(ppo(sampler_is="mask", sampler_is_clamp=(0.75, 3.0)), [2.0, -1.0])
    rows = list(readable(rollouts, Rewards({"model": np.zeros(2)}, {}), records, said, texts_of))
    tokens = rows[0]["tokens"]
    assert (tokens["total"], tokens["sampled"], len(tokens["ids"])) == (4, 3, 3)
    assert tokens["answers"] == [1, 3] and tokens["left_out"] == [1]
    assert [len(tokens[name]) for name in ("advantages", "engine", "trainer", "reference")] == [2] * 4
    np.testing.assert_array_equal(
        np.array(tokens["engine"], np.float32), np.array(SAMPLER[0][1:3], np.float32)
    )


def test_numbers_are_read_as_they_were() -> None:
    values = np.array([1 / 3, -0.1, 1e-30, 0, np.nan, -np.inf, 3e38], np.float32)
    found = shortest(values)
    assert found[4:6] == [None, None]
    known = [0, 1, 2, 3, 6]
    np.testing.assert_array_equal(np.array([found[i] for i in known], np.float32), values[known])
    assert max(len(str(value)) for value in found) < 15


def many(numbers: Sequence[int], n: int) -> list[Rollout]:
    """`n` answers each to the rows with these numbers."""
    prompts = [Prompt((), [number], {"number": number}, False) for number in numbers]
    logprobs = np.zeros(2, np.float32)
    return [
        Rollout(prompt, compact(prompt.tokens, [1]), logprobs, True) for prompt in prompts for _ in range(n)
    ]


def test_the_same_prompts_are_shown_again() -> None:
    requested = config(n_samples_per_prompt=8)
    rollouts = many(range(16), 8)
    shown = chosen_answers(rollouts, requested)
    assert len(shown) == ANSWERS and shown == sorted(shown)
    rows = {rollouts[i].prompt.row["number"] for i in shown}
    assert len(rows) == 2, "four of each"
    again = many(range(15, -1, -1), 8)
    assert {again[i].prompt.row["number"] for i in chosen_answers(again, requested)} == rows
    smaller = many([*rows, 99], 8)
    assert rows <= {smaller[i].prompt.row["number"] for i in chosen_answers(smaller, requested)} | rows


@pytest.mark.parametrize(
    ("prompts", "n", "count"), [(1, 8, 8), (4, 2, 8), (1, 1, 1), (64, 1, 8), (9, 2, 8), (3, 4, 8), (2, 64, 8)]
)
def test_some_answers_are_shown_even_where_all_are_kept(prompts: int, n: int, count: int) -> None:
    rollouts = many(range(prompts), n)
    shown = chosen_answers(rollouts, config(n_samples_per_prompt=n))
    assert len(shown) == count
    everything = config(n_samples_per_prompt=n, keep_rollouts=True)
    assert chosen_answers(rollouts, everything) == shown


def test_an_iteration_records_what_it_trained_on() -> None:
    requested = config(advantage_estimator="grpo")
    given = setup_of(requested, PROMPTS, {"reward:reward_model": "rm"}, [0], 0)
    seen: dict[str, Any] = {}

    class Remembers(Fleet):
        def train(self, experience: Any, updates: Any, beside: Any, stored: Any) -> Any:
            seen["experience"] = list(experience)
            return super().train(experience, updates, beside, stored)

    fleet: Any = Remembers(lambda prompt, j: float(j) if prompt % 2 else 1.0)
    done = ppo_iteration(fleet, given, Carried(0, {}), 0.3, schedule_of(requested, 0, 4, 0))
    assert list(done.records) == list(range(8))
    for i, record in done.records.items():
        trained = seen["experience"][i]
        mask = trained.document.mask_array
        np.testing.assert_array_equal(
            record.advantages, on_tokens(trained.advantages, trained.document)[mask]
        )
        assert record.trainer is not None and record.trainer.tolist() == [-1.0] * 3 and record.ages == (0, 0)
    rows = list(readable(done.rollouts, done.rewards, done.records, said, texts_of))
    assert [row["answer"] for row in rows] == [1, 2] * 4
    assert [row["rewards"]["reward_model"] for row in rows] == done.rewards.by_source["reward_model"].tolist()


@pytest.mark.parametrize("slow", [False, True])
def test_texts_of_tokens_are_the_text(slow: bool, material: Path) -> None:
    tokenizer = load_tokenizer(str(material / "base"))
    text = "ab 中文\n\N{GRINNING FACE} </script>"
    tokens = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    given: Any = tokenizer
    if slow:
        given = SimpleNamespace(decode=tokenizer.decode, all_special_ids=tokenizer.all_special_ids)
    found = token_texts_of(given)(tokens)
    assert len(found.texts) == len(tokens) and found.special == [len(tokens) - 1]
    assert found.texts[-1] == tokenizer.eos_token
    if not slow:
        assert "".join(found.texts[:-1]) == text and "" in found.texts, "parts of characters have no text"
    assert token_texts_of(given)([]) == TokenTexts([], [])


def test_bytes_that_make_no_character_are_not_decoded_again_and_again(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(material / "base"))
    character = tokenizer("中", add_special_tokens=False).input_ids
    assert len(character) > 1
    waits: list[int] = []  # of each stream, the tokens that waited last

    class Counted:
        def __init__(self, skip_special_tokens: bool):
            self.stream = DecodeStream(skip_special_tokens=skip_special_tokens)
            waits.append(0)

        def step(self, fast: Any, token: int) -> str | None:
            found = self.stream.step(fast, token)
            waits[-1] = 0 if found else waits[-1] + 1
            return found

    monkeypatch.setattr(texts_module, "DecodeStream", Counted)
    count = 250 * texts_module.WAITING
    found = token_texts_of(tokenizer)([*character, *[character[0]] * count, *character])
    assert len(found.texts) == count + 2 * len(character)
    assert waits == [texts_module.WAITING] * 250 + [0]
    assert "".join(found.texts[: len(character)]) == "".join(found.texts[-len(character) :]) == "中"
    assert not any(found.texts[len(character) : -len(character)])


def test_a_resumed_run_shows_no_answers_of_an_earlier_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run / "rollouts").mkdir(parents=True)
    (run / "rollouts" / "iteration1.jsonl").touch()
    fleet: Any = SimpleNamespace(
        probe=lambda *_, **__: SimpleNamespace(gap=0.0, bound=1.0), decode=said, token_texts=texts_of
    )
    loop = IterationLoop(fleet, setup(), None, run, 2, 0)
    loop.begin(None)
    assert not list((run / "rollouts").iterdir())
    _, records, rollouts = recorded(ppo(), [2.0, -1.0])
    rewards = Rewards({"model": np.array([2.0, -1.0])}, {})
    timeline: Any = None
    loop._write_readable(1, Iteration({}, 0.0, Carried(0, {}), rollouts, rewards, timeline, records))
    rows = [json.loads(line) for line in (run / "rollouts" / "iteration1.jsonl").read_text().splitlines()]
    assert [len(row["tokens"]["advantages"]) for row in rows] == [3, 2]
