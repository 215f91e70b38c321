"""The page of a stage's recorded answers: what it says of each token, and what it leaves out."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from evaluation.report.rollouts import rollout_page
from evaluation.report.rollouts.answer_rows import RecordedAnswer, iteration_files, read_answers
from evaluation.report.rollouts.answer_view import answers_html, facts_of
from evaluation.report.rollouts.rollout_page import spread, write_rollout_page
from evaluation.report.rollouts.token_turns import (
    advantage_level,
    advantage_range,
    gap_level,
    gaps_of,
    turns_of,
)
from evaluation.report.run_page import in_subfolder, write_report
from rlhf_core.runs.run_dir import VALIDATION
from tests.support.finished_run import finish
from tests.support.recorded_answers import Words, answered, episode, write
from tests.unit.evaluation.report.test_page import Page

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\"'&{{7*7}}\x1b[31m\u202e\ud800"


def one_answer(run_dir: Path, words: Words, text: str = "yes it is", **given: object) -> RecordedAnswer:
    file = write(run_dir, 3, words, [answered(words, 1, text)], [0.8], **given)  # type: ignore[arg-type]
    (answer,) = read_answers(3, file)
    return answer


def test_an_answer_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    answer = one_answer(tmp_path, Words())
    assert answer.tokens is not None
    assert answer.tokens.texts == ["Question ", "1? ", "yes ", "it ", "is ", "<|end|>"]
    assert answer.tokens.advantages == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert answer.tokens.special == {5} and answer.tokens.answers == [2, 6]
    assert gaps_of(answer.tokens) == pytest.approx([0, 0.05, 0.1, 0.15], abs=1e-6)
    assert (answer.iteration, answer.number, answer.prompt) == (3, 1, "Question 1?")
    assert answer.rewards == {"judge": 0.8, "length": None} and answer.ages == (0, 2)
    assert dict(facts_of(answer)) == {
        "reward": "judge 0.8, length –",
        "reward parts": "weighted sum 0.8",
        "KL to the reference": "0.25 nats in total, times 0.1 in the reward",
        "ended": "complete",
        "length": "4 tokens sampled of 6",
        "age of the weights": "0 to 2 updates behind",
        "trained on": "yes",
        "advantage": "+0.2 to +0.8, mean +0.5",
        "gap, trainer − engine": "mean |gap| 0.075, largest 0.15 nats",
    }


def test_turns_tell_who_wrote_what(tmp_path: Path) -> None:
    words = Words()
    rollouts = [episode(words, 4, "call search", "found it", "it is there")]
    (answer,) = read_answers(2, write(tmp_path, 2, words, rollouts, [-1.0], trained=False))
    turns = turns_of(answer, 1.0)
    assert [(turn.kind, turn.label) for turn in turns] == [
        ("prompt", "prompt, not trained on"),
        ("sampled", "sampled 1, not trained on"),
        ("given", "tool, not trained on"),
        ("sampled", "sampled 2, not trained on"),
    ]
    assert "".join(token.text for turn in turns for token in turn.tokens) == "".join(answer.tokens.texts)  # type: ignore[union-attr]
    first = turns[1].tokens[0]
    assert first.style == "an4" and first.title.startswith(
        "advantage -1, gap 0, engine -0.5 (p 0.607), trainer"
    )
    # six sampled tokens in all: the second turn goes on where the first ended
    assert turns[3].tokens[0].title.startswith("advantage -0.571, gap +0.15")
    facts = dict(facts_of(answer))
    assert facts["tools called"] == "search 1" and facts["length"] == "7 tokens sampled of 11, in 2 turns"
    assert facts["trained on"].startswith("no")


def test_colours_have_fixed_borders() -> None:
    assert [advantage_level(value, 2.0) for value in (0.0, 0.1, -0.5, 1.0, 1.99, -2.0, 2.0, None)] == [
        "", "ap1", "an2", "ap3", "ap4", "an4", "ap4", ""
    ]  # fmt: skip
    assert advantage_level(0.0, 0.0) == "", "no signal has no colour"
    gaps = (0.0, 0.009, -0.01, 0.05, -0.1, 0.3, -40.0, None)
    assert [gap_level(gap) for gap in gaps] == ["", "", "gn1", "gp2", "gn3", "gp4", "gn4", ""]


def test_an_answer_without_signal_has_numbers_and_no_colour(tmp_path: Path) -> None:
    words = Words()
    file = write(tmp_path, 1, words, [answered(words, 1, "no", cut=True)], [0.0], gap=0.0)
    (answer,) = read_answers(1, file)
    assert advantage_range([answer]) == 0.0
    sampled = turns_of(answer, 0.0)[1]
    assert [(token.text, token.style) for token in sampled.tokens] == [("no ", "")]
    assert sampled.tokens[0].title.startswith("advantage 0, gap 0")
    facts = dict(facts_of(answer))
    assert facts["ended"] == "cut by the limit of tokens" and facts["advantage"] == "0"
    assert facts["length"] == "1 tokens sampled of 3" and facts["age of the weights"] == "0 updates behind"


def test_earlier_versions_rows_are_shown_without_tokens(tmp_path: Path) -> None:
    old = {"prompt": [{"role": "user", "content": "why?"}], "response": "so", "finished": False}
    talk = [*old["prompt"], {"role": "assistant", "content": "so"}]  # type: ignore[misc]
    played = {"messages": talk, "turns": 1, "finished": True, "rewards": {"game": None}, "failure": "it fell"}
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    file = tmp_path / "run" / "rollouts" / "iteration12.jsonl"
    rows = [old | {"rewards": {"judge": 1.0}}, played]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"row": "ab", "prompt"\n[]\n')
    one, other = read_answers(12, file)
    assert one.key == other.key and one.tokens is None and one.trained is None
    assert dict(facts_of(one)) == {"reward": "judge 1", "ended": "cut by a limit"}
    assert dict(facts_of(other)) == {"reward": "game –", "ended": "failed: it fell"}
    html = answers_html([one, other], 0.0)
    assert "why?" in html and "Its tokens are not recorded." in html
    page = write_rollout_page(tmp_path, "ppo", tmp_path / "run")
    assert page is not None and (page.answers, page.iterations) == (2, 1)
    text = Page((tmp_path / page.address).read_text()).text
    assert "2 more are not shown" in text and "Colour of tokens" not in text


def test_rows_whose_lists_do_not_fit_are_left_out(tmp_path: Path) -> None:
    words = Words()
    file = write(tmp_path, 1, words, [answered(words, 1, "yes it is")], [1.0])
    row = json.loads(file.read_text())
    damaged: list[tuple[str, list[object]]] = [
        ("texts", []),
        ("advantages", [1.0]),
        ("answers", [2, 99]),
        ("answers", [2]),
        ("starts", [99]),
        ("starts", [-5]),
        ("engine", []),
    ]
    for name, wrong in damaged:
        file.write_text(json.dumps(row | {"tokens": row["tokens"] | {name: wrong}}))
        assert not list(read_answers(1, file)), name


def test_a_number_that_is_not_finite_is_unknown(tmp_path: Path) -> None:
    words = Words()
    file = write(tmp_path, 1, words, [answered(words, 1, "yes it is")], [1.0])
    row = json.loads(file.read_text())
    wrong = [float("nan"), float("inf"), *row["tokens"]["advantages"][2:]]
    file.write_text(json.dumps(row | {"tokens": row["tokens"] | {"advantages": wrong}}))
    (answer,) = read_answers(1, file)
    assert answer.tokens is not None and answer.tokens.advantages[:2] == [None, None]
    assert len(turns_of(answer, advantage_range([answer]))) == 2


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_what_is_no_file_of_the_run_is_not_opened(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run" / "rollouts"
    folder.parent.mkdir()
    if what == "folder":
        words = Words()
        write(tmp_path / "other", 1, words, [answered(words, 1, "yes it is")], [1.0])
        folder.symlink_to(tmp_path / "other" / "rollouts")
    else:
        folder.mkdir()
        os.mkfifo(folder / "iteration1.jsonl")
    assert iteration_files(tmp_path / "run") == {}


def test_the_report_leads_to_the_page_and_hostile_text_is_inert(tmp_path: Path) -> None:
    ppo = finish(tmp_path, "ppo", lines=20)
    words = Words()
    for iteration in (1, 5):
        rollouts = [
            answered(words, 1, HOSTILE),
            answered(words, 1, "b"),
            episode(words, 2, HOSTILE, HOSTILE, "c"),
        ]
        write(ppo.run_dir, iteration, words, rollouts, [0.5, -0.5, 1.0])
    report = write_report(tmp_path / "demo", "demo", [ppo])
    link = f"rollouts/{ppo.run_dir.name}.html"
    assert f'href="{link}"' in report.read_text()
    assert f'href="../{link}"' in in_subfolder(report.read_text())
    html = (tmp_path / "demo" / link).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in html
    assert "{{7*7}}" in page.text and "\x1b" not in html and "\u202e" not in html
    assert "6 answers of 2 iterations" in page.text and "not shown" not in page.text
    assert "−1 to +1" in page.text and "iteration 1" in page.text and "iteration 5" in page.text
    assert re.search(r'<i class="ap4" title="advantage \+1, gap', html)
    assert page.tags.count("article") == 6 and html.count('type="checkbox"') == 4


def test_a_stage_without_answers_has_no_page(tmp_path: Path) -> None:
    ppo = finish(tmp_path, "ppo", lines=20)
    report = write_report(tmp_path / "demo", "demo", [ppo])
    assert "rollouts/" not in report.read_text() and not (tmp_path / "demo" / "rollouts").exists()


def test_large_runs_have_a_small_page_that_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_page, "MAX_TOKENS", 60)
    monkeypatch.setattr(rollout_page, "MAX_ITERATIONS", 5)
    monkeypatch.setattr(rollout_page, "OF_ITERATION", 3)
    run_dir = tmp_path / "stages" / "ppo-1"
    words = Words()
    for iteration in range(1, 10):
        rollouts = [answered(words, number, "yes it is") for number in (iteration + 10, *range(5))]
        write(run_dir, iteration, words, rollouts, [0.1] * 6)
    assert list(iteration_files(run_dir)) == list(range(1, 10))
    page = write_rollout_page(tmp_path / "demo", "ppo", run_dir)
    assert page is not None and page.answers == 10, "of six tokens each"
    text = Page((tmp_path / "demo" / page.address).read_text()).text
    assert "20 more are not shown" in text and "4 further iterations are not shown" in text
    for iteration in (1, 9):
        assert text.count(f"iteration {iteration}") >= 3, "the first and the last iteration are complete"


def test_numbers_are_spread_evenly() -> None:
    assert spread(range(1, 101), 4) == [1, 34, 67, 100] and spread([7], 4) == [7] and spread([], 4) == []


def test_an_answer_that_alone_is_too_large_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_page, "MAX_TOKENS", 3)
    words = Words()
    write(tmp_path / "run", 1, words, [answered(words, 1, "yes it is")] * 2, [0.1, 0.2])
    page = write_rollout_page(tmp_path, "ppo", tmp_path / "run")
    assert page is not None and page.answers == 1


def test_answers_of_validations_have_a_page_with_the_same_prompts(tmp_path: Path) -> None:
    ppo = finish(tmp_path, "ppo", lines=20)
    folder = ppo.run_dir / VALIDATION
    folder.mkdir()
    for iteration in (0, 5):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"q{i}"}],
                "response": f"a{iteration}",
                "rewards": {"rm": i},
            }
            for i in range(40)
        ]
        (folder / f"iteration{iteration}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = write_report(tmp_path / "demo", "demo", [ppo])
    address = f"rollouts/{ppo.run_dir.name}.validation.html"
    assert f'href="{address}"' in report.read_text() and "Validation answers of ppo" in report.read_text()
    page = Page((tmp_path / "demo" / address).read_text())
    assert "48 answers of 2 iterations; 32 more are not shown" in page.text
    assert page.text.count("iterations 0, 5") == 24, "the same prompts of both"
