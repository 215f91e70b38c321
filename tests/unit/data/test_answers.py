"""Sampled answers on their way to training: what each post-processor makes of them, how they are read, and
the preferences stage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf_core.stages.preferences.preferences_stage
import rlhf_core.stages.preferences.sample_answers
from rlhf_core.config import Data, EngineConfig, PostProcessor, Preferences
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import reward_suffix, store_suffix, stored_suffix, with_suffix
from rlhf_core.data.rows.mixture import check_columns
from rlhf_core.data.sources import answer_documents, labelled_answers
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.preferences.post_process import post_process
from tests.support.stage_request import stage_request
from tests.support.text_rows import rows_of_text
from tests.support.tiny_models import reward_model

P1, P2, P3 = (({"role": "user", "content": text},) for text in ("one", "two", "three"))
TEXTS = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "g"]]
REWARDS = [[1.0, 5.0, 3.0], [2.0, 2.0, 2.0], [4.0, 1.0, 7.0]]
WHOLE = [[True] * 3] * 3


def write(path: Path, rows: list[dict[str, Any]]) -> Data:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(sources=str(path))


def made(
    kind: PostProcessor,
    rewards: list[list[float]] = REWARDS,
    finished: list[list[bool]] = WHOLE,
    min_reward: float | None = None,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    found = post_process(kind, [P1, P2, P3], TEXTS, rewards, finished, min_reward)
    return [{**row.model_dump(), "prompt": row.prompt[0]["content"]} for row in found.rows], found.dropped


# Post-processors


def test_dpo_pairs_the_best_with_the_worst() -> None:
    whole = {"chosen_cut": False, "rejected_cut": False}
    rows, dropped = made("dpo", [[1.0, 5.0, 3.0], [2.0, 2.0, 2.0], [4.0, 5.0, 3.0]])
    assert rows == [
        {"prompt": "one", "chosen": "b", "rejected": "a", "chosen_score": 5.0, "rejected_score": 1.0} | whole,
        {"prompt": "three", "chosen": "h", "rejected": "g", "chosen_score": 5.0, "rejected_score": 3.0}
        | whole,
    ]
    assert dropped == {"equal_score": 1, "equal_text": 0, "no_reward": 0}
    assert made("dpo", [[1.0] * 3, [2.0] * 3, [4.0, 4.0, 7.0]]) == (
        [],
        {"equal_score": 2, "equal_text": 1, "no_reward": 0},
    )


def test_kto_labels_by_the_mean_of_the_prompts_own_answers() -> None:
    rows, dropped = made("kto")
    # "c" and the first "g" score the mean of their prompts, 3 and 4, and prompt two's answers all the same:
    # they say nothing.
    found = [(row["prompt"], row["response"], row["reward"], row["label"]) for row in rows]
    assert found == [
        ("one", "a", 1.0, False),
        ("one", "b", 5.0, True),
        ("three", "h", 1.0, False),
        ("three", "g", 7.0, True),
    ]
    assert dropped == {"equal_score": 1, "no_reward": 0, "no_whole_answer": 0}


@pytest.mark.parametrize("group", [[0.1, 0.2, 0.3], [0.6, 0.7, 0.8], [0.3, 0.8, 0.55]])
def test_kto_leaves_out_an_answer_at_the_mean_of_rounded_rewards(group: list[float]) -> None:
    """Rewards are float32, in which the middle one is beside the mean."""
    rewards = torch.tensor([group] * 3).tolist()
    rows, _ = made("kto", rewards)
    assert sorted(row["label"] for row in rows) == [False] * 3 + [True] * 3


def test_kto_is_not_misled_by_rounding() -> None:
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert made("kto", [[0.1] * 3] * 3) == ([], {"equal_score": 3, "no_reward": 0, "no_whole_answer": 0})


def test_rejection_sampling_keeps_the_best_above_the_threshold() -> None:
    rows, dropped = made("rejection_sampling")
    assert [(row["response"], row["reward"]) for row in rows] == [
        ("b", 5.0),
        ("d", 2.0),
        ("g", 7.0),
    ] and dropped["min_reward"] == 0
    rows, dropped = made("rejection_sampling", min_reward=5.0)
    assert [row["response"] for row in rows] == ["b", "g"] and dropped == dict(
        min_reward=1, no_reward=0, no_whole_answer=0
    )


def test_conditional_sft_keeps_every_answer() -> None:
    rows, dropped = made("conditional_sft")
    assert [(row["response"], row["reward"]) for row in rows] == list(
        zip("abcdefghg", chain(*REWARDS), strict=True)
    )
    assert dropped == {"no_reward": 0, "no_whole_answer": 0}


def test_cut_answers_are_left_out_except_in_pairs() -> None:
    finished = [[True, False, True], [False] * 3, [True] * 3]
    assert [row["response"] for row in made("conditional_sft", finished=finished)[0]] == "a c g h g".split()
    rows, dropped = made("rejection_sampling", finished=finished)
    assert [row["response"] for row in rows] == ["c", "g"] and dropped == dict(
        min_reward=0, no_reward=0, no_whole_answer=1
    )
    assert [row["response"] for row in made("kto", finished=finished)[0][:2]] == [
        "a",
        "c",
    ], "the mean is that of the whole answers"
    pairs = made("dpo", finished=finished)[0]
    assert [(row["chosen"], row["chosen_cut"], row["rejected_cut"]) for row in pairs] == [
        ("b", True, False),
        ("g", False, False),
    ]


@pytest.mark.parametrize(
    ("kind", "kept", "no_reward"),
    [
        ("dpo", ["g"], 2),
        ("kto", ["h", "g"], 2),
        ("rejection_sampling", ["b", "g"], 1),
        ("conditional_sft", ["b", "h", "g"], 1),
    ],
)
def test_answers_without_a_reward_are_left_out(kind: PostProcessor, kept: list[str], no_reward: int) -> None:
    # Of prompt one the best answer alone has a reward, of prompt two none has, of prompt three all but the
    # first.
    rows, dropped = made(kind, [[nan, 5.0, nan], [nan] * 3, [nan, 1.0, 7.0]])
    assert [row["chosen" if kind == "dpo" else "response"] for row in rows] == kept
    assert dropped["no_reward"] == no_reward
    assert not any(isnan(value) for row in rows for value in row.values() if isinstance(value, float))


# Reading


@pytest.mark.parametrize("labels", [(True, False), (1, 0), ("True", "false"), ("1", "0"), (1.0, 0.0)])
def test_labelled_answers_and_pairs_become_the_same(
    labels: tuple[Any, Any], renderer: Renderer, tmp_path: Path
) -> None:
    single = [
        {"q": "2 plus 2", "a": text, "good": label} for text, label in zip(("4", "5"), labels, strict=True)
    ]
    data = write(tmp_path / "single.jsonl", single)
    source = data.sources[0].model_copy(update={"prompt_key": "q", "response_key": "a", "label_key": "good"})
    data = data.model_copy(update={"sources": (source,)})
    check_columns(data, "labelled")
    loaded = labelled_answers(data, renderer, 64, seed=0)
    assert [item.desirable for item in loaded.items] == [True, False]
    assert loaded.items[0].document == renderer.answer([{"role": "user", "content": "2 plus 2"}], "4")
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "2 plus 2", "chosen": "4", "rejected": "5"}])
    check_columns(pairs, "labelled")
    split = labelled_answers(pairs, renderer, 64, seed=0)
    assert split.items == loaded.items and split.report.counts == loaded.report.counts
    assert split.report.survey.items == split.report.survey.kept == 2


def test_answers_are_cut_as_pairs_are(renderer: Renderer, tmp_path: Path) -> None:
    data = write(
        tmp_path / "a.jsonl",
        [{"prompt": "7" * 60, "response": "5" * 40, "label": True, "reward": float(i)} for i in range(2)],
    )
    loaded = labelled_answers(data, renderer, 32, seed=0)
    (document, *_), report = [item.document for item in loaded.items], loaded.report
    assert len(document) == 32 and sum(document.mask) == 16 and report.survey.truncated == 2
    conditioned = answer_documents(data, renderer, 64, 0, "reward")
    document = conditioned.documents.items[1]
    text = renderer.tokenizer.decode(conditioned.documents.items[1].tokens)
    assert len(document) == 64 and sum(document.mask) == 32
    # the end of the prompt stays, with its reward
    assert conditioned.best_suffix == " <rm_score>: 1.00" and "<rm_score>: 1.00" in text


@pytest.mark.parametrize(
    ("row", "kind", "told"),
    rows_of_text("""
    {prompt: a, response: b, label: maybe} | labelled | column 'label' must be true or false (or 1 or 0), found 'maybe'
    {prompt: a, chosen: b} | labelled | there is no column 'rejected' (and no column 'label' that labels single answers
    {prompt: a, response: b} | scored | there is no column 'reward'
    {prompt: a, response: b, reward: null} | scored | column 'reward' must be a finite number, found None
    {prompt: a, response: 3} | answer | column 'response' must be a string, found int
    {prompt: a, response: b, reward: .nan} | scored | column 'reward' must be a finite number, found nan
    """),
)
def test_a_wrong_row_is_one_sentence(row: dict[str, Any], kind: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        check_columns(write(tmp_path / "rows.jsonl", [row]), kind)
    assert told in str(caught.value) and "\n" not in str(caught.value)


# The reward in the prompt


def test_suffixes_are_standardised_over_the_round() -> None:
    def suffixes(rewards: list[float]) -> list[str]:
        return [reward_suffix(rewards)(reward) for reward in rewards]

    assert suffixes([1.0, 2.0, 3.0]) == [" <rm_score>: -1.22", " <rm_score>: 0.00", " <rm_score>: 1.22"]
    assert suffixes([100.0, 300.0]) == [" <rm_score>: -1.00", " <rm_score>: 1.00"]
    assert " <rm_score>: -0.00" not in suffixes([0.0, 0.999, 1.0, 1.001, 2.0])
    with pytest.raises(ValueError, match="nothing to condition on"):
        suffixes([2.0, 2.0])


def test_held_out_prompts_end_as_those_trained_on(renderer: Renderer, tmp_path: Path) -> None:
    rows = [{"prompt": "say", "response": "a", "reward": reward} for reward in (1.0, 2.0, 3.0)]
    trained = answer_documents(write(tmp_path / "a.jsonl", rows), renderer, 64, 0, "reward")
    # alone they would have nothing to be standardised by
    held_out = write(tmp_path / "b.jsonl", [rows[2], rows[2]])
    documents = answer_documents(held_out, renderer, 64, 0, "reward", suffix_of=trained.suffix_of).documents
    assert [document.tokens for document in documents.items] == [trained.documents.items[2].tokens] * 2


def test_a_renderer_asks_for_the_stored_suffix(renderer: Renderer, tmp_path: Path) -> None:
    assert stored_suffix(str(tmp_path)) == "" == stored_suffix("org/model")
    store_suffix(tmp_path, " <rm_score>: 2.31")
    asking = Renderer(renderer.tokenizer, "chat", stored_suffix(str(tmp_path)))
    question = [{"role": "user", "content": "Count these digits: 123"}]
    assert (
        asking.prompt(question)
        == renderer.prompt(with_suffix(question, " <rm_score>: 2.31"))
        != renderer.prompt(question)
    )
    long = [{"role": "user", "content": "9" * 100}]
    tokens, cut = asking.prompt_within(long, 40)
    assert cut and len(tokens) <= 40 and "9 <rm_score>: 2.31" in renderer.tokenizer.decode(tokens)
    with_answer = [*question, {"role": "assistant", "content": "3"}]
    assert asking.conversation(with_answer) == renderer.conversation(with_answer)


# The stage, with a sampler that needs no vLLM


class ScriptedSampler:
    """Answers "3" and "4" to each prompt in turn; the prompts are kept to look at."""

    prompts: list[list[int]]

    def __init__(self, model: str, config: EngineConfig, **settings: Any):
        self.answers = [
            load_tokenizer(model)(text, add_special_tokens=False).input_ids for text in ("3", "4")
        ]

    def stream(
        self, prompts: list[list[int]], seeds: list[int], how: Sampling, pictures: Sequence[Any] = ()
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        ScriptedSampler.prompts = prompts
        for prompt in range(len(prompts)):
            yield (
                prompt,
                [
                    SampledAnswer([*self.answers[i % 2], how.stop_token_ids[0]], [], True)
                    for i in range(how.n)
                ],
            )

    def close(self) -> None:
        pass


@pytest.mark.parametrize("suffix", ["", " <rm_score>: 1.50"])
@pytest.mark.parametrize("kind", ["dpo", "kto", "rejection_sampling", "conditional_sft"])
def test_the_stage_writes_what_its_post_processor_makes(
    kind: PostProcessor, suffix: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "policy"
    base.symlink_to(material / "base")
    if suffix:
        base.unlink()
        base.mkdir()
        for file in (material / "base").iterdir():
            (base / file.name).symlink_to(file)
        store_suffix(base, suffix)
    tokenizer = load_tokenizer(str(base))
    scored: list[str] = []

    def score(self: RewardScorer, documents: list[Any]) -> list[float]:
        scored.extend(tokenizer.decode(document.tokens) for document in documents)
        return [1.0 if "<|assistant|>4" in text else 0.0 for text in scored]

    monkeypatch.setattr(rlhf_core.stages.preferences.sample_answers, "open_engine", ScriptedSampler)
    monkeypatch.setattr(RewardScorer, "score", score)
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": f"{i} plus {i}"} for i in range(3)])
    config = Preferences(
        policy="base",
        reward="rm",
        prompts=prompts,
        n_samples_per_prompt=4,
        prompt_max_len=64,
        generate_max_len=64,
        post_processor=kind,
    )
    inputs = {"base": str(base), "rm": str(reward_model(material / "base", tmp_path / "rm"))}
    (tmp_path / "run").mkdir()
    outcome = rlhf_core.stages.preferences.preferences_stage.run(
        stage_request(config, inputs, name="x"), RunDir(tmp_path / "run")
    )
    assert all(
        tokenizer.decode(prompt).endswith(f"{suffix}<|end|><|assistant|>")
        for prompt in ScriptedSampler.prompts
    )
    # the reward model sees the plain prompt
    assert len(scored) == 12 and not any("rm_score" in text for text in scored)
    output = "pairs" if kind == "dpo" else "answers"
    assert outcome.outputs == {output: f"{output}.jsonl", "data_report": "data_report.json"}
    rows = [json.loads(line) for line in (tmp_path / "run" / f"{output}.jsonl").read_text().splitlines()]
    assert (
        len(rows)
        == outcome.metrics[output]
        == {"dpo": 3, "kto": 12, "rejection_sampling": 3, "conditional_sft": 12}[kind]
    )
    assert "rm_score" not in json.dumps(rows) and outcome.metrics["reward/best"] == 1.0
    if kind == "kto":
        assert {(row["response"], row["label"]) for row in rows} == {("4", True), ("3", False)}
        assert (
            len(
                labelled_answers(
                    Data(sources=str(tmp_path / "run" / "answers.jsonl")), Renderer(tokenizer, "chat"), 64, 0
                ).items
            )
            == 12
        )
    elif kind == "rejection_sampling":
        assert {row["response"] for row in rows} == {"4"}
