"""What of feedback is received: counts, personal data, evaluation questions."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.feedback import personal_data
from rlhf_core.feedback import receive as receiving
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.personal_data import masked
from rlhf_core.feedback.receive import ReceivedRow, receive, rows_of

WORDS = (
    "the model answer question river mountain seven plus equals python code list value city music garden"
    " paper number train light".split()
)


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def iban(rng: random.Random) -> str:
    body = "".join(rng.choice("0123456789") for _ in range(18))
    check = 98 - int(body + "131400") % 97  # DE as 13 14
    text = f"DE{check:02d}{body}"
    return " ".join(text[i : i + 4] for i in range(0, len(text), 4)) if rng.random() < 0.5 else text


def card(rng: random.Random) -> str:
    digits = [4, *(rng.randrange(10) for _ in range(14))]
    total = sum(d if i % 2 else (2 * d - 9 if 2 * d > 9 else 2 * d) for i, d in enumerate(digits))
    text = "".join(map(str, [*digits, -total % 10]))
    return rng.choice(
        [
            text,
            " ".join(text[i : i + 4] for i in range(0, 16, 4)),
            "-".join(text[i : i + 4] for i in range(0, 16, 4)),
        ]
    )


def mail(rng: random.Random) -> str:
    name = rng.choice(["ann", "b.smith", "c_d", "e+f"])
    host = rng.choice(["example", "post-office"])
    return f"{name}{rng.randrange(100)}@{host}.{rng.choice(['com', 'de', 'co.uk'])}"


def phone(rng: random.Random) -> str:
    line = f"{rng.randrange(200, 999)}-{rng.randrange(1000, 9999)}"
    last = rng.randrange(10_000_000, 99_999_999)
    return rng.choice(
        [
            f"212-{line}",
            f"(415) {line}",
            f"+1 646 {line}",
            f"+49 30 {last}",
            f"0151 {last}",
            f"030 {last}",
            "+33 1 42 68 53 00",
        ]
    )


def harmless(rng: random.Random) -> str:
    a = rng.randrange(10**6, 10**9)
    b = rng.randrange(10, 99)
    return rng.choice(
        [
            f"{a} + {a}",
            f"2026-0{b % 9 + 1}-{b % 20 + 10} 12:30:{b}",
            f"version 1.{b}.3",
            f"3.1415926535{a}",
            f"{a:,}",
            f"x@{b}",
            f"10.0.{b}.1",
            "@name",
            f"f{a}(x)",
        ]
    )


@pytest.mark.parametrize(
    ("kind", "make", "recall"),
    [
        ("EMAIL_ADDRESS", mail, 1.0),
        ("IBAN_CODE", iban, 1.0),
        ("CREDIT_CARD", card, 1.0),
        ("PHONE_NUMBER", phone, 0.95),
    ],
)
def test_planted_personal_data_is_replaced_whole(kind: str, make: object, recall: float) -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(300):
        planted = make(rng)  # type: ignore[operator]
        before = sentence(rng, 5)
        after = sentence(rng, 5)
        text = masked([f"{before} {planted} {after}"]).texts[0]
        found += text == f"{before} <{kind}> {after}"
    assert found >= recall * 300


def test_numbers_dates_and_versions_stay() -> None:
    rng = random.Random(0)
    texts = [f"{sentence(rng, 4)} {harmless(rng)} {sentence(rng, 4)}" for _ in range(1000)]
    # precision of 99 %
    assert sum(text != kept for text, kept in zip(texts, masked(texts).texts, strict=True)) <= 10


LONG = {  # texts of 200 kB on which presidio's patterns alone take minutes, by what they repeat
    "dots before an @": "a." * 100_000 + "@b",
    "base64 before a mail": "QWxhZGRpbjpvcGVuIHNlc2FtZQ" * 7_500 + " ann@example.org",
    "addresses of machines": "10.0.17.1 " * 20_000 + "ann@example.org",
    "mails": "ann@example.org " * 12_500,
    "mails without an end": "a@b." * 50_000,
    "digits": "7" * 200_000,
    "phones": "212-555-0123 " * 15_000,
    "cards": "4111 1111 1111 1111 " * 10_000,
    "ibans": "DE89370400440532013000 " * 8_700,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_recognisers_get_small_pieces_of_long_texts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, list[int]] = {kind: [] for kind in personal_data.SUSPECTS}

    class Counted:
        def analyze(self, part: str, kinds: list[str], artifacts: None) -> list[Any]:
            given[kinds[0]].append(len(part))
            return []

    monkeypatch.setattr(personal_data, "_recognisers", lambda: dict.fromkeys(given, Counted()))
    masked([text])
    assert any(given.values())
    assert all(
        sum(sizes) <= 2 * len(text) and max(sizes, default=0) <= personal_data.PIECE
        for sizes in given.values()
    )


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("base64 before a mail", "EMAIL_ADDRESS", 1),
        ("mails", "EMAIL_ADDRESS", 12_500),
        ("ibans", "IBAN_CODE", 8_700),
    ],
)
def test_long_texts_are_masked_whole(name: str, kind: str, count: int) -> None:
    done = masked([LONG[name]])
    assert done.found == {kind: count}
    assert done.texts[0].count(f"<{kind}>") == count


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_a_long_text_give_what_the_whole_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    makers = (mail, iban, card, phone, harmless)
    text = " ".join(f"{sentence(rng, rng.randrange(12))} {rng.choice(makers)(rng)}," for _ in range(150))
    whole = [personal_data._Window(0, len(text), 0, len(text))]
    in_pieces = Counter(span for kind in personal_data.SUSPECTS for span in personal_data._spans(kind, text))
    monkeypatch.setattr(personal_data, "_mail_windows", lambda text: whole)
    monkeypatch.setattr(personal_data, "_pieces", lambda suspect, text: whole)
    assert in_pieces == Counter(
        span for kind in personal_data.SUSPECTS for span in personal_data._spans(kind, text)
    )


def test_nothing_is_asked_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **named: object) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refused)
    assert masked(["ann@example.org and 212-555-0123"]).found == {"EMAIL_ADDRESS": 1, "PHONE_NUMBER": 1}


def test_planted_evaluation_questions_are_found_and_others_pass() -> None:
    rng = random.Random(0)
    vocabulary = [f"{a}{b}" for a in WORDS for b in WORDS]

    def text(words: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(words))

    asked = [text(rng.randrange(3, 40)) for _ in range(500)]
    questions = Questions(asked)
    # case, punctuation, whitespace
    changed = [question.upper().replace(" ", ",  ") + "?!" for question in asked]
    assert all(map(questions.met_by, changed))
    # as a part
    inside = [f"{text(10)} {question} {text(10)}" for question in asked if len(question.split()) >= 5]
    assert all(map(questions.met_by, inside))
    # a run of it
    thirteen = [" ".join(question.split()[3:16]) for question in asked if len(question.split()) >= 16]
    assert thirteen and all(questions.met_by(f"{text(5)} {run} {text(5)}") for run in thirteen)
    assert sum(questions.met_by(text(rng.randrange(3, 60))) for _ in range(5000)) == 0
    shorter = [" ".join(question.split()[:-1]) for question in asked if 5 <= len(question.split()) < 13]
    assert shorter and not any(map(questions.met_by, shorter)) and not questions.met_by("")


def test_compatible_characters_are_one_form() -> None:
    assert Questions(["What is ﬁve times the number two"]).met_by("WHAT is five times the number two")


LABEL = {"prompt": "q", "answer_a": "a", "answer_b": "b", "verdict": "A>B"}


@pytest.mark.parametrize("undone", [[], ["1"], {}, {"a": 1}, 5, True])
def test_ids_of_other_types_take_nothing_back(undone: Any, tmp_path: Path) -> None:
    rows = [
        LABEL | {"id": "1"},
        LABEL | {"id": ["1"]},
        {"undone": undone},
        LABEL | {"id": "2"},
        {"undone": "2"},
    ]
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [given.row for given in rows_of(str(file)) if "verdict" in given.row] == rows[:2]


def test_a_batch_ends_after_its_rows_or_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BATCH", 4)
    monkeypatch.setattr(receiving, "BATCH_BYTES", 100)
    sizes: list[int] = []
    inbox = Inbox(tmp_path / "chat.inbox")
    add = inbox.add
    monkeypatch.setattr(inbox, "add", lambda rows: sizes.append(len(rows)) or add(rows))
    row = {"prompt": "q", "response": "a", "thumb": "up"}
    given = [ReceivedRow(str(n), row | {"prompt": str(n)}, size=1 if n < 5 else 50) for n in range(9)]
    assert receive(inbox, given, Questions(())).new == 9
    assert sizes == [4, 3, 2]  # four rows; 1 + 50 + 50 bytes; the rest


def test_rows_of_a_file_know_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"b": 22}\n')
    assert [given.size for given in rows_of(str(tmp_path / "rows.jsonl"))] == [9, 10]
