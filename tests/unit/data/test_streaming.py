"""Documents on disk: the same training as from memory, read once for all ranks and resumes, and no larger in
memory for a larger set."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rlhf_core.stages.dpo
import rlhf_core.stages.kto
import rlhf_core.stages.reward_model
import rlhf_core.stages.sft
from rlhf_core.config import DPO, KTO, SFT, Data, RewardModel, StageConfig
from rlhf_core.data import sources
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.document_files import ENDS, ORDER, PROMPTS, REPORT, TOKENS, VALUES
from rlhf_core.data.documents import Lazy, joined, mapped
from rlhf_core.data.packing import Passes
from rlhf_core.data.rows.mixture import load_rows
from rlhf_core.data.sources import preference_pairs, sft_documents
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.training.train_loop import order_of_epoch
from tests.support.programs import captured
from tests.support.stage_request import stage_request

COMMON: dict[str, Any] = dict(
    train_batch_size=8, micro_train_batch_size=4, max_len=96, learning_rate=1e-3, max_epochs=2
)
STAGES: dict[str, Any] = {
    "sft": rlhf_core.stages.sft,
    "reward_model": rlhf_core.stages.reward_model,
    "dpo": rlhf_core.stages.dpo,
    "kto": rlhf_core.stages.kto,
}
LOADERS = dict(
    sft="sft_documents", reward_model="preference_pairs", dpo="preference_pairs", kto="labelled_answers"
)
MEMORY = Path(__file__).parents[2] / "support" / "streamed_training.py"


def mixture(material: Path, stem: str, count: int) -> Data:
    parts = [
        {"path": str(material / f"{stem}{end}.jsonl"), "probability": share}
        for end, share in (("", 0.7), ("_heldout", 0.3))
    ]
    return Data.model_validate({"sources": parts, "max_samples": count})


def config_of(kind: str, material: Path) -> StageConfig:
    if kind == "sft":
        return SFT(
            model="base", data=mixture(material, "sft", 28), eval_data=mixture(material, "sft", 4), **COMMON
        )
    pairs = mixture(material, "preferences", 14)
    held_out = mixture(material, "preferences", 4)
    if kind == "reward_model":
        return RewardModel(model="base", data=pairs, eval_data=held_out, **COMMON)
    return {"dpo": DPO, "kto": KTO}[kind](policy="base", data=pairs, eval_data=held_out, **COMMON)


def run(config: StageConfig, material: Path, folder: Path) -> list[dict[str, float]]:
    folder.mkdir()
    request = stage_request(config, material / "base", seed=3)
    STAGES[config.stage].run(request, RunDir(folder))
    return [{name: value for name, value in line.items() if name != "time"} for line in read_metrics(folder)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("sft", "dpo") else pytest.mark.long) for kind in STAGES]
)
def test_documents_on_disk_train_bit_for_bit_as_lists_in_memory_do(
    kind: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(kind, material)
    streamed = run(config, material, tmp_path / "streamed")
    load = getattr(STAGES[kind], LOADERS[kind])

    def in_memory(*arguments: Any) -> Any:
        loaded = load(*arguments)
        assert isinstance(loaded.items, Lazy)
        return loaded._replace(items=list(loaded.items))

    monkeypatch.setattr(STAGES[kind], LOADERS[kind], in_memory)
    assert run(config, material, tmp_path / "memory") == streamed and len(streamed) > 3
    for name, weight in load_file(tmp_path / "memory" / "checkpoint" / "model.safetensors").items():
        assert torch.equal(
            weight, load_file(tmp_path / "streamed" / "checkpoint" / "model.safetensors")[name]
        ), name


def test_documents_on_disk_are_those_of_the_rows_in_the_order_of_the_mixture(material: Path) -> None:
    """Files are read in their own order; the items come in that of `load_rows`."""
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    data = mixture(material, "preferences", 40)
    expected = [
        (renderer.answer([{"role": "user", "content": row["prompt"]}], row["chosen"]), row["rejected"])
        for row in load_rows(data, seed=5)
    ]
    items = preference_pairs(data, renderer, 400, seed=5).items
    assert [item.chosen for item in items] == [chosen for chosen, _ in expected] and len(items) == 40
    assert [
        renderer.tokenizer.decode(item.rejected.tokens[item.rejected.mask.index(True) : -1]) for item in items
    ] == [r for _, r in expected]


def test_a_data_set_is_tokenised_once_for_all_ranks_and_resumes(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    data = mixture(material, "sft", 20)
    passes = []
    rows = sources.placed_rows
    monkeypatch.setattr(sources, "placed_rows", lambda *arguments: passes.append(1) or rows(*arguments))  # type: ignore[func-returns-value]
    found: list[Any] = []
    ranks = [
        threading.Thread(target=lambda: found.append(sft_documents(data, renderer, 96, 0, tmp_path)))
        for _ in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(passes) == 1 and found[0].items == found[1].items and len(found[0].items) == 20
    again = sft_documents(data, renderer, 96, 0, tmp_path)
    # the resumed run has the survey too
    assert len(passes) == 1 and again == found[0] and again.report.survey is not None
    sft_documents(data, renderer, 64, 0, tmp_path)
    assert len(passes) == 2, "another limit is another data set"


def test_a_reading_that_was_killed_leaves_nothing_that_is_taken_for_whole(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    data = mixture(material, "sft", 20)
    conversation = renderer.conversation
    seen = []

    def dies(messages: Any, tools: Any) -> Any:
        seen.append(1)
        if len(seen) == 12:
            raise KeyboardInterrupt
        return conversation(messages, tools)

    monkeypatch.setattr(renderer, "conversation", dies)
    with pytest.raises(KeyboardInterrupt):
        sft_documents(data, renderer, 96, 0, tmp_path)
    assert len(sft_documents(data, renderer, 96, 0, tmp_path).items) == 20 and len(seen) == 32


@pytest.mark.parametrize("name", [TOKENS, ENDS, VALUES, ORDER, PROMPTS, REPORT])
@pytest.mark.parametrize("size", [0, 8])
def test_documents_that_a_power_failure_cut_off_are_read_again(
    material: Path, tmp_path: Path, name: str, size: int
) -> None:
    renderer = Renderer(load_tokenizer(str(material / "base")), "chat")
    data = mixture(material, "sft", 20)
    whole = list(sft_documents(data, renderer, 96, 0, tmp_path).items)
    (file,) = tmp_path.glob(f"*/{name}")
    os.truncate(file, size)
    assert list(sft_documents(data, renderer, 96, 0, tmp_path).items) == whole and file.stat().st_size > size


def test_documents_are_on_the_disk_before_they_have_their_name(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    sft_documents(
        mixture(material, "sft", 20),
        Renderer(load_tokenizer(str(material / "base")), "chat"),
        96,
        0,
        tmp_path,
    )
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {Path(path).name for path in synced if Path(path).parent.name == f".{folder.name}"} >= {
        TOKENS,
        ENDS,
        VALUES,
        ORDER,
        REPORT,
    }


def test_the_order_of_an_epoch_is_pythons_shuffle_of_a_list() -> None:
    order = list(range(1000))
    random.Random("7-2").shuffle(order)
    assert list(order_of_epoch(1000, 2, 7)) == order and order_of_epoch(1000, 2, 7).itemsize == 8


def test_lazy_sequences_behave_as_lists() -> None:
    squares = Lazy(7, lambda i: i * i)
    expected = [i * i for i in range(7)]
    assert list(squares) == expected == squares[:] and squares[-1] == 36 and squares[1:6:2] == expected[1:6:2]
    assert squares == expected and squares != expected[:-1] and squares != [*expected[:-1], 0]
    with pytest.raises(IndexError):
        squares[7]
    assert list(mapped(squares, str)) == list(map(str, expected))
    assert [list(part) for part in Passes(4).in_order(joined(squares, [1, 2]), lambda _: 1)] == [
        [0, 1, 4, 9],
        [16, 25, 36, 1],
        [2],
    ]


def train_under_limit(kind: str, material: Path, folder: Path, *how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MEMORY), kind, str(material / "base"), str(folder), *how]
    return captured(command, timeout=900, env={**os.environ, "PYTHONPATH": str(MEMORY.parents[2])})


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("sft", marks=pytest.mark.long), pytest.param("dpo", marks=pytest.mark.long)]
)
def test_a_data_set_larger_than_the_memory_allowed_trains(kind: str, material: Path, tmp_path: Path) -> None:
    """The stage runs under a limit (RLIMIT_DATA) on the memory it may allocate from the start of its work;
    the set is larger."""
    done = train_under_limit(kind, material, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"] == 4 and told["stored_mib"] > 1.5 * told["allowed_mib"], told


@pytest.mark.slow
@pytest.mark.long
def test_the_same_data_set_as_a_list_breaks_the_limit(material: Path, tmp_path: Path) -> None:
    done = train_under_limit("sft", material, tmp_path, "in-memory")
    assert done.returncode != 0 and "MemoryError" in done.stderr, done.stderr[-2000:]
