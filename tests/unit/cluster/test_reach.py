"""Nodes that answer, fall silent and come back; what is said of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from rlhf_core.cluster.reach import LOST_SECONDS, NOTICE_SECONDS, Reach, TcpEndpoint, answering
from rlhf_core.system.machine import NodeLost


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def place(listener: socket.socket, name: str = "the Ray node 10.0.0.2") -> TcpEndpoint:
    return TcpEndpoint(name, *listener.getsockname()[:2])


def test_what_listens_answers_even_if_its_process_does_not_accept(listener: socket.socket) -> None:
    there = place(listener)
    gone = TcpEndpoint("gone", "127.0.0.1", 1)
    assert answering([gone, there]) == [there]
    listener.close()
    assert answering([there]) == [] == answering([])


def test_a_silent_node_is_noticed_then_lost(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    node = place(listener)
    reach = Reach()
    reach.note([node], [], 100.0)
    reach.note([node], [], 100.0 + NOTICE_SECONDS)
    reach.note([node], [], 101.0 + NOTICE_SECONDS)
    reach.require()
    assert (
        capsys.readouterr().out == "the Ray node 10.0.0.2 gives no answer; the stage waits 30 s for it\n"
    ), "once"
    reach.note([node], [], 100.0 + LOST_SECONDS)
    with pytest.raises(
        NodeLost,
        match=(
            r"^the Ray node 10\.0\.0\.2 gave no answer for 30 s: .* run again when it is back, or on the"
            r" nodes"
        ),
    ):
        reach.require()


def test_a_node_that_answers_again_starts_anew(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    node = place(listener)
    reach = Reach()
    for start in (100.0, 200.0):
        reach.note([node], [], start)
        reach.note([node], [], start + LOST_SECONDS - 1)
        reach.note([node], [node], start + LOST_SECONDS)
    reach.require()
    assert capsys.readouterr().out.count("the Ray node 10.0.0.2 answers again after 30 s\n") == 2


def test_what_never_answered_is_not_watched(listener: socket.socket) -> None:
    reach = Reach()
    reach.watch([place(listener), TcpEndpoint("behind a proxy", "127.0.0.1", 1)])
    assert reach.gone() == ""
    listener.close()
    assert reach.gone() == "the Ray node 10.0.0.2"
    reach.watch([])
    assert reach.gone() == ""
