"""Publication of each kind of thing while the Hub fails, at every request in turn: it ends in the same commit
and one tag."""

from __future__ import annotations

import re

import pytest

from rlhf_core.system.processes import raised_by_us
from tests.support.hub_server import TOKEN, serve
from tests.support.publishing import (
    KINDS,
    ONCE,
    TAG,
    THREE,
    Thing,
    check_published,
    number_of_requests,
    quiet,
    send,
    things,
)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Thing]:
    return things(tmp_path_factory.mktemp("things"))


@pytest.fixture(params=KINDS)
def thing(request: pytest.FixtureRequest, every: dict[str, Thing]) -> Thing:
    return every[request.param]


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)


@pytest.mark.parametrize("how", ["refuse", "busy", "cut", "lost"])
def test_one_failure_at_each_request_in_turn_is_survived(thing: Thing, how: str) -> None:
    with serve() as undisturbed:
        expected = send(undisturbed, thing, ONCE)
    for request in range(number_of_requests(thing)):
        with serve() as server:
            server.break_at(request, how)
            assert send(server, thing, THREE) == expected
            check_published(server, thing.folder, name=thing.repository)


@pytest.mark.parametrize("how", ["refuse", "busy", "cut", "lost"])
def test_one_failure_while_a_file_goes_in_parts_is_survived(every: dict[str, Thing], how: str) -> None:
    count = number_of_requests(every["model"], 8000)
    assert count > number_of_requests(every["model"])
    for request in range(count):
        with serve(8000) as server:
            server.break_at(request, how)
            send(server, every["model"], THREE)
            check_published(server, every["model"].folder)


@pytest.mark.parametrize("how", ["refuse", "cut", "lost"])
def test_a_run_cut_off_at_each_request_is_completed_by_the_next_run(thing: Thing, how: str) -> None:
    count = number_of_requests(thing)
    assert count >= (8 if thing.repo_type == "dataset" else 12)
    for request in range(count):
        with serve() as server:
            server.break_at(request, how, times=1000)
            with pytest.raises(ConnectionError, match="run this again later, nothing is lost or doubled"):
                send(server, thing, ONCE)
            server.heal()
            send(server, thing, ONCE)
            repository = check_published(server, thing.folder, name=thing.repository)
            assert list(repository.tags) == [TAG]


FULL = (
    r"the Hub has no space left to .* of someone/tiny{}: make space or get more, then run this again, nothing"
    r" is lost or doubled"
)
REFUSED = dict(
    full=FULL.format(r" \(.*storage limit reached.*\)"),
    disk=FULL.format(".*"),
    expired=r"the Hub does not accept the token in HF_TOKEN: set it to a valid token with write access to"
    r" someone/tiny",
)


@pytest.mark.parametrize("how", REFUSED)
def test_a_full_quota_or_a_dead_token_is_one_sentence_and_the_next_run_ends_in_the_same_commit(
    thing: Thing, how: str
) -> None:
    with serve() as undisturbed:
        expected = send(undisturbed, thing, ONCE)
    for request in range(number_of_requests(thing)):
        with serve() as server:
            server.break_at(request, how, times=1000)
            with pytest.raises(ValueError) as caught:
                send(server, thing, THREE)
            said = str(caught.value)
            assert re.fullmatch(REFUSED[how], said) and TOKEN not in said and "SignedAddress" not in said
            # exit code 2 and no traceback
            assert raised_by_us(caught.value) and caught.value.__suppress_context__
            # what cannot succeed is not tried again; the client asks whether the repository is there
            assert len(server.requests) <= request + 2
            server.heal()
            assert send(server, thing, ONCE) == expected
            check_published(server, thing.folder, name=thing.repository)


@pytest.mark.parametrize("part_size", [None, 4000])
def test_large_files_of_every_kind_arrive_whole(thing: Thing, part_size: int | None) -> None:
    with serve(part_size) as server:
        send(server, thing, THREE)
        check_published(server, thing.folder, name=thing.repository)
