"""Who gets which pair on which side, second showings, undo, restarts, and two tabs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from evaluation.labelling.assignment import GAP, HOLD_SECONDS, MOST_HOLDS, Assignment, Rules, Stale
from evaluation.labelling.label_records import LABELS, HumanLabel, in_force
from evaluation.labelling.label_store import LabelFile, read_labels
from tests.support.labelling import assignment, pairs


def give(work: Assignment, annotator: str, choice: int | None = 0) -> HumanLabel | None:
    """Labels what comes next; None when nothing does."""
    task = work.next(annotator)
    return None if task is None else work.label(annotator, task.id, choice, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_each_pair_gets_its_annotators_before_a_new_one_begins(tmp_path: Path, seed: int) -> None:
    """Four annotators in random order: nobody begins a pair while another that they have not labelled has one
    label of two."""
    work = assignment(tmp_path / "labels.jsonl", 40, per_item=2, seed=seed)
    generator = random.Random(seed)
    names = ["Ann", "Bob", "Cyd", "Dan"]
    done = set[str]()
    while len(done) < len(names):
        name = generator.choice(names)
        counts = Counter(label.key for label in work.file.labels)
        mine = {label.key for label in work.file.labels if label.annotator == name}
        begun = {key for key, count in counts.items() if count == 1} - mine
        label = give(work, name)
        if label is None:
            done.add(name)
        else:
            assert label.key not in mine and (label.key in begun or not begun)
    counts = Counter(label.key for label in work.file.labels)
    assert len(counts) == 40 and set(counts.values()) == {2} and work.finished == 40
    annotators = {key: {label.annotator for label in work.file.labels if label.key == key} for key in counts}
    assert all(len(who) == 2 for who in annotators.values()), "two different annotators"


def test_pages_that_are_open_count_as_labels_until_they_are_left(tmp_path: Path) -> None:
    now = [0.0]
    work = assignment(tmp_path / "labels.jsonl", 1, clock=lambda: now[0], per_item=1)
    task = work.next("Ann")
    assert task is not None and work.next("Ann") == task and work.next("Bob") is None
    assert work.progress("Ann").left == 1 and work.progress("Bob").left == 0
    now[0] = HOLD_SECONDS + 1
    other = work.next("Bob")
    assert other is not None and other.pair == task.pair and other.id != task.id
    work.label("Ann", task.id, 2, 1.0)
    work.label("Bob", other.id, 2, 1.0)  # a label that somebody made is never refused
    assert len(work.file.labels) == 2


def test_a_skipped_pair_goes_to_others(tmp_path: Path) -> None:
    work = assignment(tmp_path / "labels.jsonl", 3, per_item=1)
    skipped = give(work, "Ann", None)
    assert skipped is not None and skipped.verdict is None
    assert [give(work, "Ann") is not None for _ in range(3)] == [True, True, False]
    assert work.progress("Ann") == (2, 1, 0)
    last = give(work, "Bob")
    assert last is not None and last.key == skipped.key and give(work, "Bob") is None and work.finished == 3


def test_sides_are_balanced_and_differ_between_people(tmp_path: Path) -> None:
    work = assignment(tmp_path / "labels.jsonl", 400, per_item=2)
    sides = {}
    for name in ("Ann", "Bob"):
        tasks = [work._task(name, key) for key in work.pairs]
        sides[name] = [task.shown_first for task in tasks if task is not None]
        assert 160 <= sides[name].count("a") <= 240  # 4 standard deviations
    assert 160 <= sum(ann == bob for ann, bob in zip(*sides.values(), strict=True)) <= 240
    again = assignment(tmp_path / "labels.jsonl", 400, per_item=2)
    assert [task.shown_first for key in again.pairs if (task := again._task("Ann", key))] == sides["Ann"]
    other = assignment(tmp_path / "labels.jsonl", 400, seed=1)
    assert [task.shown_first for key in other.pairs if (task := other._task("Ann", key))] != sides["Ann"]


def test_sides_follow_from_a_secret_and_not_from_the_seed_alone(tmp_path: Path) -> None:
    files = [LabelFile(tmp_path / name) for name in ("one.jsonl", "other.jsonl", "again.jsonl")]
    works = [
        Assignment(pairs(40), file, Rules(1, 0.0, 0), secret)
        for file, secret in zip(files, ("a", "b", "a"), strict=True)
    ]
    one, other, again = (
        [label.shown_first for _ in range(40) if (label := give(work, "Ann"))] for work in works
    )
    assert one == again != other and set(one) == set(other) == {"a", "b"}


def test_names_that_ask_and_do_not_label_are_bounded(tmp_path: Path) -> None:
    work = assignment(tmp_path / "labels.jsonl", 5, per_item=2)
    first = work.next("Ann")
    assert first is not None
    for n in range(2 * MOST_HOLDS):
        work.progress(f"name {n}")
        work.next(f"name {n}")
        work.undo(f"name {n}")
    assert len(work.annotators) == len(work._holds) <= MOST_HOLDS and not work._firsts and not work._repeats
    # a page that was open longest is answered still
    assert work.label("Ann", first.id, 0, 1.0).annotator == "Ann"


def test_verdicts_are_about_the_answers_of_the_row_whatever_the_side(tmp_path: Path) -> None:
    work = assignment(tmp_path / "labels.jsonl", 60, per_item=1)
    seen = set()
    for n in range(60):
        task = work.next("Ann")
        choice = n % 5
        assert task is not None
        label = work.label("Ann", task.id, choice, 1.0)
        assert label.shown_first == task.shown_first
        wanted = choice if task.shown_first == "a" else 4 - choice
        assert label.verdict == LABELS[wanted]
        seen.add((task.shown_first, choice))
    assert len(seen) == 10
    assert read_labels(tmp_path / "labels.jsonl") == work.file.labels


def test_a_share_of_pairs_comes_again_with_the_sides_swapped(tmp_path: Path) -> None:
    work = assignment(tmp_path / "labels.jsonl", 400, per_item=1, repeat=0.1)
    while give(work, "Ann") is not None:
        pass
    labels = work.file.labels
    repeats = [(place, label) for place, label in enumerate(labels) if label.repeat_of is not None]
    assert 20 <= len(repeats) <= 60 and len(labels) == 400 + len(repeats)
    for place, again in repeats:
        first = next(label for label in labels if label.id == again.repeat_of)
        assert (first.key, first.repeat_of) == (again.key, None) and first.shown_first != again.shown_first
        assert place - labels.index(first) > GAP
    assert len({again.key for _, again in repeats}) == len(repeats), "once each"
    # a second label of one annotator is none of another
    assert work.finished == 400 and give(work, "Bob") is None


def test_undo_walks_back_and_gives_the_pair_again(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    work = assignment(path, 10, per_item=1)
    first, second, third = (give(work, "Ann", n) for n in range(3))
    assert first and second and third
    give(work, "Bob")
    assert work.undo("Ann") == third and work.undo("Ann") == second
    task = work.next("Ann")
    assert task is not None and task.pair.key == second.key and work.progress("Ann").labelled == 1
    assert [label.id for label in in_force(read_labels(path)) if label.annotator == "Ann"] == [first.id]
    again = work.label("Ann", task.id, 4, 1.0)
    assert again.id != second.id and again.shown_first == second.shown_first
    back = give(work, "Ann")
    # which lacks a label, as it did when it was first given
    assert back is not None and back.key == third.key
    assert work.undo("Cyd") is None
    undone = [label for label in read_labels(path) if label.undone]
    assert [label.undone for label in undone] == [third.id, second.id]
    assert all(label.verdict is None for label in undone)


def test_a_restart_knows_all_that_was_labelled_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    work = assignment(path, 30, per_item=2, repeat=0.3)
    for name in ("Ann", "Bob", "Ann", "Cyd") * 9:
        give(work, name)
    work.undo("Bob")
    again = assignment(path, 30, per_item=2, repeat=0.3)
    for name in ("Ann", "Bob", "Cyd"):
        assert again.progress(name).labelled == work.progress(name).labelled
    assert again.finished == work.finished and again._decided == work._decided
    before = work.undo("Ann")
    assert before is not None and again.undo("Ann") == before


def test_a_pair_is_labelled_once_by_a_person(tmp_path: Path) -> None:
    work = assignment(tmp_path / "labels.jsonl", 10)
    task = work.next("Ann")
    assert task is not None
    work.label("Ann", task.id, 0, 1.0)
    for name, told in (("Ann", task.id), ("Bob", task.id), ("Ann", "made up"), ("Ann", "ü")):
        with pytest.raises(Stale):
            work.label(name, told, 0, 1.0)
    assert len(work.file.labels) == 1
    work.undo("Ann")
    work.label("Ann", task.id, 1, 1.0)  # taken back: it may be labelled again, also by the other tab


def test_a_page_that_was_opened_under_another_seed_labels_nothing(tmp_path: Path) -> None:
    """The side of an answer may differ there, and the verdict would be about the other one."""
    old, new = (assignment(tmp_path / "labels.jsonl", 200, seed=seed) for seed in (0, 1))
    stale = 0
    for key in old.pairs:
        one = old._task("Ann", key)
        other = new._task("Ann", key)
        assert one is not None
        assert other is not None
        assert (one.id == other.id) == (one.shown_first == other.shown_first)
        stale += one.id != other.id
    assert stale > 50


def test_labels_of_pairs_that_are_not_drawn_stay(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    work = assignment(path, 10, per_item=1)
    for _ in range(10):
        give(work, "Ann")
    fewer = assignment(path, 3, per_item=1)
    assert fewer.finished == 3 and fewer.next("Bob") is None and fewer.progress("Ann").labelled == 10
    while fewer.undo("Ann") is not None:
        pass
    assert len(in_force(read_labels(path))) == 7


@pytest.mark.parametrize("name", ["", "  ", "x" * 41, "a\nb\x00", "\u202eAnn"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="give a name of 1 to 40 letters"):
        assignment(tmp_path / "labels.jsonl").known_name(name)


def test_another_spelling_is_the_same_person(tmp_path: Path) -> None:
    work = assignment(tmp_path / "labels.jsonl")
    give(work, work.known_name("Zoë  B. "))
    assert {work.known_name(name) for name in ("zoë b.", "Zoe\u0308 B.", "ZOË B.")} == {"Zoë B."}
