"""Weights in buckets: nothing is lost on the way, buckets are bounded, and the route fits the placement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing.reductions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.cluster.rank_environment import store_address
from rlhf_core.rollout import weight_transfer
from rlhf_core.rollout.vllm.weight_receiver import _with_head
from rlhf_core.rollout.weight_transfer import (
    ALIGNMENT,
    Broadcast,
    ChecksumMismatch,
    Rendezvous,
    Route,
    SameGpu,
    Sums,
    choose_route,
    from_bucket,
    to_buckets,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def some(shapes: list[tuple[int, ...]], seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"w{i}", torch.randn(shape, generator=generator).to(DTYPES[i % len(DTYPES)]))
        for i, shape in enumerate(shapes)
    ]


def assert_same(got: list[tuple[str, Tensor]], sent: list[tuple[str, Tensor]]) -> None:
    assert [name for name, _ in got] == [name for name, _ in sent]
    for (name, a), (_, b) in zip(got, sent, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), max_size=12),
    st.sampled_from([ALIGNMENT, 64, 256, 4096]),
)
def test_what_is_packed_comes_out_the_same(shapes: list[tuple[int, ...]], space: int) -> None:
    weights = some(shapes)
    got: list[tuple[str, Tensor]] = []
    for entries, data in to_buckets(iter(weights), CPU, space):
        # only a weight that is larger than a bucket may be one
        assert len(data) <= space or len(entries) == 1
        # the buffer is used again
        got += [(name, weight.clone()) for name, weight in from_bucket(entries, data)]
    assert_same(got, weights)


def test_a_transposed_weight_arrives_as_it_is_read() -> None:
    weight = torch.arange(12.0).reshape(3, 4).T
    ((entries, data),) = to_buckets(iter([("w", weight)]), CPU)
    assert_same(list(from_bucket(entries, data)), [("w", weight.contiguous())])


def test_one_sender_reaches_all_receivers_and_the_channel_serves_again() -> None:
    weights = some([(40, 3), (7,), (), (5, 5)])
    rendezvous = Rendezvous(store_address(), {}, b"", 30)
    received: dict[int, list[list[tuple[str, Tensor]]]] = {1: [], 2: []}

    def receive(rank: int) -> None:
        channel = Broadcast("gloo", rank, 3, rendezvous)
        for _ in range(2):
            received[rank].append([(name, weight.clone()) for name, weight in channel.receive()])

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in received]
    for thread in threads:
        thread.start()
    sender = Broadcast("gloo", 0, 3, rendezvous)
    sender.send(iter(weights))
    sender.send(iter(weights[:2]))
    for thread in threads:
        thread.join(30)
    for first, second in received.values():
        assert_same(first, weights)
        assert_same(second, weights[:2])


@pytest.mark.parametrize(
    ("trainer", "engines", "route"),
    [
        (["a"], ["a"], Route("gpus", 0, 1)),
        (["a", "b"], ["b", "a"], Route("gpus", 0, 2)),
        (["a", "b"], ["c", "d"], Route("nccl", 0, 2)),
        # rank 0 has an engine on its GPU, NCCL wants GPUs apart
        (["a", "b"], ["a", "c"], Route("nccl", 1, 2)),
        (["a"], ["a", "c"], Route("gloo", 0, 2)),
        (["a"], ["c", "c"], Route("gloo", 0, 2)),
        ([None], [None], Route("gloo", 0, 1)),
    ],
)
def test_the_route_fits_the_gpus(trainer: list[str | None], engines: list[str | None], route: Route) -> None:
    assert choose_route(trainer, engines) == route


OPENED: list[int] = []


def opens(*handle: Any) -> Tensor:
    """In place of PyTorch's `rebuild_cuda_tensor`: records the device of the call."""
    OPENED.append(handle[6])
    return torch.tensor(handle[7], dtype=torch.uint8)


def as_handle(data: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """As PyTorch's `reduce_tensor` on the only GPU that its process sees, with the bytes in place of the
    memory's handle."""
    return opens, (
        Tensor,
        data.shape,
        data.stride(),
        0,
        torch.storage.TypedStorage,
        data.dtype,
        0,
        data.tolist(),
        *[None] * 7,
    )


def test_memory_is_opened_on_the_receivers_device_and_that_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second process of an engine over two GPUs computes on its device 1, which is device 0 of the
    trainer rank there."""
    monkeypatch.setattr(weight_transfer, "to_buckets", lambda weights, device: to_buckets(weights, CPU, 64))
    monkeypatch.setattr(weight_transfer, "reduce_tensor", as_handle, raising=False)
    monkeypatch.setitem(ForkingPickler._extra_reducers, Tensor, as_handle)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    waited: list[tuple[str, int]] = []

    def synchronize(device: int | None = None) -> None:
        waited.append((threading.current_thread().name, 1 if device is None else device))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    weights = some([(5, 3), (7,), (40,)])
    here, there = Pipe()
    sender = threading.Thread(target=SameGpu([here]).send, args=(iter(weights),), name="sender")
    OPENED.clear()
    sender.start()
    assert_same([(name, weight.clone()) for name, weight in SameGpu([there]).receive()], weights)
    sender.join(30)
    assert OPENED == [1, 1, 1], "the sender's index"
    assert [device for thread, device in waited if thread != "sender"] == [1, 1, 1]


def test_a_tied_head_is_sent_once() -> None:
    def names(*given: str) -> list[str]:
        def weights() -> Iterator[tuple[str, Tensor]]:
            yield from ((name, torch.zeros(1)) for name in given)

        return [name for name, _ in _with_head(weights())]

    assert names("model.embed_tokens.weight", "model.norm.weight")[-1] == "lm_head.weight"
    for order in (
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("model.embed_tokens.weight", "lm_head.weight"),
    ):
        assert names(*order) == list(order)


@given(
    st.integers(0, 40).flatmap(
        lambda n: st.tuples(st.binary(min_size=n, max_size=n), st.integers(0, max(0, n - 1)))
    )
)
def test_a_changed_byte_changes_the_checksum(made: tuple[bytes, int]) -> None:
    data, place = made
    sent = Sums()
    arrived = Sums()
    for half in (data[:16], data[16:]):
        sent.add(torch.tensor(list(half), dtype=torch.uint8))
        arrived.add(torch.tensor(list(half), dtype=torch.uint8))
    arrived.compare(sent.total())
    if data:
        changed = Sums()
        changed.add(torch.tensor([byte ^ (place == i) for i, byte in enumerate(data)], dtype=torch.uint8))
        with pytest.raises(ChecksumMismatch, match="not those that the actor sent"):
            changed.compare(sent.total())


def test_a_bucket_may_begin_anywhere() -> None:
    data = torch.arange(64, dtype=torch.uint8)
    sent = Sums()
    arrived = Sums()
    sent.add(data[3:40])
    arrived.add(data[3:40].clone())
    assert sent.total() == arrived.total() != 0


def test_a_bucket_that_changes_on_its_way_ends_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = some([(40, 3), (7,), (5, 5)])
    rendezvous = Rendezvous(store_address(), {}, b"", 30)
    monkeypatch.setattr(Broadcast, "_broadcast", flipping(Broadcast._broadcast))
    errors: list[str] = []

    def receive() -> None:
        try:
            list(Broadcast("gloo", 1, 2, rendezvous).receive())
        except ChecksumMismatch as error:
            errors.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    Broadcast("gloo", 0, 2, rendezvous).send(iter(weights))
    thread.join(30)
    assert errors and "not those that the actor sent" in errors[0]


def flipping(broadcast: Callable[[Broadcast, Tensor], None]) -> Callable[[Broadcast, Tensor], None]:
    """Of what the second process receives, a bit of each bucket of weights is another one."""

    def arrive(self: Broadcast, data: Tensor) -> None:
        broadcast(self, data)
        # the headers are shorter
        if self._group.rank() == 1 and data.dtype == torch.uint8 and len(data) > 600:
            data[9] ^= 1

    return arrive
