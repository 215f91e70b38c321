"""Images are decoded once, ahead of the pass that needs them, and only so many are kept."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlhf_core.data.documents import Document, EncodedPicture
from rlhf_core.data.pictures.picture_source import DAMAGED, PictureFault, PictureSource
from rlhf_core.objectives.losses import Loss
from rlhf_core.objectives.picture_reader import PictureReader, Tensors
from rlhf_core.training.engine import Engine
from rlhf_core.training.train_loop import accumulate


def stored(name: str) -> PictureSource:
    return PictureSource(data=name.encode())


def document(*sources: PictureSource) -> Document:
    pictures = tuple(EncodedPicture(0, 1, source) for source in sources)
    return Document([1, 2], [False, True], pictures=pictures)


class Decoder:
    """Counts how often each image is decoded. `slow` waits until it is set."""

    def __init__(self) -> None:
        self.decoded: list[bytes] = []
        self.slow = Event()
        self.slow.set()

    def __call__(self, source: PictureSource) -> Tensors:
        assert self.slow.wait(20)
        self.decoded.append(bytes(source.data))
        if source.data == b"damaged":
            raise PictureFault(DAMAGED, "the image is damaged")
        return {"pixels": np.frombuffer(source.data.ljust(8, b"."), np.uint8)}


def test_images_are_read_in_order_and_decoded_once() -> None:
    decoder = Decoder()
    reader = PictureReader(7, decoder)
    first, second = stored("a"), stored("b")
    found = reader.read([second, first, second])
    assert [bytes(each["pixels"])[:1] for each in found] == [b"b", b"a", b"b"]
    reader.request([document(first, second)])
    assert reader.tensors(first) is found[1]
    assert sorted(decoder.decoded) == [b"a", b"b"]


def test_requested_images_are_decoded_before_they_are_read() -> None:
    decoder = Decoder()
    decoder.slow.clear()
    reader = PictureReader(7, decoder)
    reader.request([document(stored("a")), document(), document(stored("b"), stored("a"))])  # does not wait
    assert decoder.decoded == []
    decoder.slow.set()
    for waiting in list(reader._requested.values()):
        waiting.result(20)
    assert sorted(decoder.decoded) == [b"a", b"b"]
    reader.read([stored("a"), stored("b")])
    assert sorted(decoder.decoded) == [b"a", b"b"]


@pytest.mark.parametrize("kept_bytes", [0, 16])
def test_images_that_were_read_longest_ago_are_dropped(kept_bytes: int) -> None:
    decoder = Decoder()
    reader = PictureReader(7, decoder, kept_bytes)
    assert len(reader.read([stored(name) for name in "abc"])) == 3
    reader.tensors(stored("c"))
    reader.tensors(stored("a"))
    assert decoder.decoded.count(b"c") == (1 if kept_bytes else 2)
    assert decoder.decoded.count(b"a") == 2


def test_a_fault_is_raised_where_the_image_is_read_and_not_kept() -> None:
    decoder = Decoder()
    reader = PictureReader(7, decoder)
    reader.request([document(stored("damaged"))])
    for _ in range(2):
        with pytest.raises(ValueError, match="the image is damaged; it could be read when the stage began"):
            reader.read([stored("a"), stored("damaged")])
    assert decoder.decoded.count(b"a") == 1
    assert decoder.decoded.count(b"damaged") == 2


def test_a_file_that_changes_is_decoded_again(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    seen = []

    def decode(source: PictureSource) -> Tensors:
        seen.append(Path(source.file).read_bytes())
        return {}

    reader = PictureReader(7, decode)
    source = PictureSource("image.png", str(tmp_path))
    for content in (b"old", b"newer"):
        file.write_bytes(content)
        reader.tensors(source)
        reader.tensors(source)
    assert seen == [b"old", b"newer"]
    file.unlink()
    with pytest.raises(ValueError, match="restore it"):
        reader.tensors(source)


class OnePassAhead:
    """An engine on one rank, whose passes take place at once. `seen`: what was requested before each pass."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.sharing = 0, 1, 1
        self.device = torch.device("cpu")
        self.requested: list[bytes] = []
        self.seen: list[list[bytes]] = []
        self.module = SimpleNamespace(reader=SimpleNamespace(request=self._request))

    def _request(self, documents: list[Document]) -> None:
        self.requested += [bytes(picture.source.data) for each in documents for picture in each.pictures]

    def loss(self, micro: list[Document]) -> Loss:
        self.seen.append(list(self.requested))
        return Loss(torch.ones(()), {"loss": torch.ones(())})

    def backward(self, loss: torch.Tensor, last: bool) -> None: ...

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_the_images_of_the_next_pass_are_requested_before_a_pass() -> None:
    engine: Any = OnePassAhead()
    passes = [[document(stored("a")), document()], [document()], [document(stored("b"), stored("c"))]]
    accumulate(cast(Engine, engine), passes, engine.loss, documents=lambda micro: micro)
    assert engine.seen == [[b"a"], [b"a", b"b", b"c"], [b"a", b"b", b"c"]]
