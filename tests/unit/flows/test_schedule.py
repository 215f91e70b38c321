"""Which stages run side by side, on which GPUs, and what a plan on four GPUs looks like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows import running
from flows.schedule import (
    Schedule,
    SharedResources,
    StageResources,
    Start,
    cost_of,
    machine_here,
    schedule_of,
)
from rlhf_core.config import Recipe
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.runs.prepared import Prepared
from rlhf_core.system import machine as system

FOUR = SharedResources(32, ("0", "1", "2", "3"))
PAIRS = {"sources": "pairs.jsonl"}


def schedule(
    costs: Mapping[str, StageResources],
    parents: Mapping[str, tuple[str, ...]],
    machine: SharedResources = FOUR,
    at_most: int = 9,
) -> Schedule:
    return Schedule(machine, at_most, costs, {name: parents.get(name, ()) for name in costs})


def recipe(tmp_path: Path, stages: Mapping[str, Any], **more: Any) -> Recipe:
    return Recipe(name="r", base_model="org/model", artifacts=str(tmp_path), stages=dict(stages), **more)


def branches(gpus: int) -> dict[str, Any]:
    """Three variants of DPO after SFT, and an evaluation of each."""
    ranks = {"num_ranks_per_node": gpus, "gpus": 1}
    found: dict[str, Any] = {
        "sft": dict(stage="sft", data={"sources": "chats.jsonl"}, ranks={"num_ranks_per_node": 4, "gpus": 1})
    }
    for name in "abc":
        found[name] = dict(stage="dpo", policy="sft", data=PAIRS, beta=0.1 + ord(name), ranks=ranks)
        found[f"judge_{name}"] = {
            "stage": "evaluation",
            "models": [name],
            "baseline": "sft",
            "questions": {"path": "q.jsonl"},
            "engine": {"gpus": 1},
        }
    return found


def test_a_recorded_plan_on_four_gpus(tmp_path: Path) -> None:
    """Each variant takes one GPU for two hours, each evaluation one for an hour, SFT four for one."""
    planned = plan(recipe(tmp_path, branches(1)))
    seconds = {node.name: {"sft": 1.0, "dpo": 2.0}.get(node.kind, 1.0) for node in planned.nodes}
    spans = schedule_of(planned, planned.nodes, FOUR).spans(seconds)
    assert [(span.name, span.start, span.end, span.gpus) for span in spans] == [
        ("sft", 0, 1, ("0", "1", "2", "3")),
        ("a", 1, 3, ("0",)),
        ("b", 1, 3, ("1",)),
        ("c", 1, 3, ("2",)),
        ("judge_a", 3, 4, ("0",)),
        ("judge_b", 3, 4, ("1",)),
        ("judge_c", 3, 4, ("2",)),
    ]
    assert max(span.end for span in spans) == 4 and sum(seconds.values()) == 10
    pairs = schedule_of(
        plan(recipe(tmp_path, branches(2))), plan(recipe(tmp_path, branches(2))).nodes, FOUR
    ).spans(seconds)
    placed = {span.name: (span.start, span.gpus) for span in pairs}
    assert placed["a"] == (1, ("0", "1")) and placed["b"] == (
        1,
        ("2", "3"),
    ), "the third waits for two free GPUs"
    assert placed["c"][0] == 3 and max(span.end for span in pairs) == 6


@pytest.mark.parametrize("at_most", [2, 3, 9])
def test_stages_at_once_share_no_gpu_and_keep_within_the_machine(at_most: int) -> None:
    names = [f"s{i}" for i in range(12)]
    costs = {name: StageResources(1 + i % 7, i % 4) for i, name in enumerate(names)}
    parents = {name: tuple(names[max(0, i - 5) : i : 2][:2]) for i, name in enumerate(names)}
    planned = schedule(costs, parents, SharedResources(9, FOUR.gpus), at_most)
    spans = planned.spans({name: 1.0 + (i * 5) % 3 for i, name in enumerate(names)})
    assert sorted(span.name for span in spans) == sorted(names), "none is left out"
    ends = {span.name: span.end for span in spans}
    for span in spans:
        assert all(ends[parent] <= span.start for parent in parents[span.name])
        together = [other for other in spans if other.start <= span.start < other.end]
        gpus = [gpu for other in together for gpu in other.gpus]
        assert len(gpus) == len(set(gpus)) and len(together) <= at_most
        assert sum(costs[other.name].cpus for other in together) <= 9
        assert len(span.gpus) == costs[span.name].gpus


def test_the_longest_chain_is_first_and_what_fits_passes_what_does_not() -> None:
    costs = {
        "short": StageResources(1, 2),
        "long": StageResources(1, 2),
        "after": StageResources(1, 1),
        "large": StageResources(1, 4),
        "small": StageResources(1, 1),
    }
    planned = schedule(costs, {"after": ("long",)})
    assert planned.starts([], {}) == [Start("long", ("0", "1")), Start("short", ("2", "3"))]
    running = {"long": Start("long", ("0", "1"))}
    # the large one waits, a GPU stays free for what comes
    assert planned.starts(["short"], running) == [Start("small", ("2",))]
    # no stage starts before its parents
    assert planned.starts([], {}, held=["long", "short", "large"]) == [Start("small", ("0",))]


def test_a_stage_that_is_done_waits_for_no_gpu() -> None:
    costs = {"long": StageResources(1, 1), "done": StageResources(1, 4), "after": StageResources(1, 3)}
    planned = Schedule(
        FOUR, 9, costs, {"long": (), "done": (), "after": ("done",)}, skipped=frozenset({"done"})
    )
    assert planned.starts([], {"long": Start("long", ("0",))}) == [Start("done", ())]
    assert planned.starts(["done"], {"long": Start("long", ("0",))}) == [Start("after", ("1", "2", "3"))]
    # what is done changes no share of the cores
    assert planned.peak == schedule(costs, {"after": ("done",)}).peak == 2


def test_one_at_a_time_is_the_recipe_s_order() -> None:
    costs = dict.fromkeys(("short", "long", "after"), StageResources(1, 0))
    planned = schedule(costs, {"after": ("long",)}, at_most=1)
    assert [span.name for span in planned.spans(dict.fromkeys(costs, 1.0))] == [
        "short",
        "long",
        "after",
    ] and planned.peak == 1


def test_what_a_stage_takes(tmp_path: Path) -> None:
    ppo = {"stage": "ppo", "prompts": {"sources": "p.jsonl"}, "actor": "base", "reward": "org/reward"}
    ppo |= {"advantage_estimator": "rloo", "n_samples_per_prompt": 4}
    half = {"gpus": 0.5}
    nodes = plan(
        recipe(
            tmp_path,
            dict(
                plain={"stage": "dpo", "policy": "base", "data": PAIRS},
                shared=ppo
                | dict.fromkeys(("actor_ranks", "reference_ranks", "reward_ranks", "engine"), half),
                colocated=ppo
                | {"colocate_all": True}
                | dict.fromkeys(("actor_ranks", "reference_ranks", "reward_ranks", "engine"), half),
                split=dict(
                    stage="preferences", policy="base", reward="org/reward", prompts={"sources": "p.jsonl"}
                )
                | {"engine": {"gpus": 1, "tensor_parallel_size": 2}},
                publication={"stage": "publication", "model": "plain"},
            ),
        )
    ).nodes
    costs = {node.name: cost_of(node.config, FOUR) for node in nodes}
    assert {name: cost.gpus for name, cost in costs.items()} == dict(
        plain=1, shared=2, colocated=1, split=2, publication=0
    )
    assert costs["publication"].cpus == 0 and costs["shared"].cpus == 4
    assert [cost_of(node.config, SharedResources(2)).gpus for node in nodes] == [0] * 5
    cluster = {node.name: cost_of(node.config, SharedResources(8, ("0",), cluster=True)) for node in nodes}
    assert cluster["plain"] == cluster["shared"] == StageResources(8, 1)
    assert cluster["publication"] == StageResources(0, 0)


@pytest.mark.parametrize(
    ("wanted", "machine", "peak"),
    [
        (None, SharedResources(8), 1),
        (None, FOUR, 3),
        (None, SharedResources(32, ("0",)), 1),
        (False, FOUR, 1),
        (True, SharedResources(8), 3),
        (True, SharedResources(2), 2),
        (2, SharedResources(8), 2),
        (2, FOUR, 2),
        (5, SharedResources(1), 1),
        (True, SharedResources(8, cluster=True), 1),
    ],
)
def test_how_many_run_at_once(
    tmp_path: Path, wanted: bool | int | None, machine: SharedResources, peak: int
) -> None:
    planned = plan(recipe(tmp_path, branches(1), side_by_side=wanted))
    assert schedule_of(planned, planned.nodes, machine).peak == peak


def test_the_environment_of_a_stage_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    planned = plan(recipe(tmp_path, branches(1), side_by_side=True))
    on = {
        machine: schedule_of(planned, planned.nodes, machine)
        for machine in (FOUR, SharedResources(7), SharedResources(8, ("0",), cluster=True))
    }
    assert on[FOUR].variables(Start("a", ("1", "3"))) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert on[FOUR].variables(Start("publication", ())) == {"CUDA_VISIBLE_DEVICES": ""}
    assert on[SharedResources(7)].variables(Start("sft", ())) == {
        "ALIGNFLOW_CORES": "2",
        "OMP_NUM_THREADS": "2",
    }, "also of a stage that is alone"
    assert on[SharedResources(8, ("0",), cluster=True)].variables(Start("a", ("0",))) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert on[SharedResources(7)].variables(Start("a", ()))["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ("0", "1", "2")), ("2,GPU-ab", ("2", "GPU-ab")), ("", ()), ("-1", ())]
)
def test_gpus_are_named_as_a_child_finds_them(
    visible: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system.Path, "glob", lambda *_: [Path(f"/dev/nvidia{i}") for i in range(3)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_here().gpus == names and not machine_here().cluster


def node(name: str, kind: str, done: bool = False) -> Any:
    return SimpleNamespace(name=name, kind=kind, done=done)


NODES = (node("a", "sft"), node("b", "dpo", done=True), node("c", "evaluation"), node("d", "ppo"))


@pytest.mark.parametrize(
    ("begun", "started"),
    [({"a"}, [("evaluation", "evaluation")]), ({"a", "c"}, [("rlhf_core", "ppo")]), ({"a", "c", "d"}, [])],
)
def test_the_next_stage_that_is_not_done(
    begun: set[str], started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(running.prepared, "plan", lambda module, kind: calls.append((module, kind)))
    running.prepare_next(NODES, begun)
    assert calls == started


@pytest.mark.parametrize(("peak", "started"), [(1, [("evaluation", "evaluation")]), (2, [])])
def test_the_first_stage_is_prepared_unless_stages_run_side_by_side(
    peak: int, started: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared()
    calls: list[tuple[str, str] | None] = []
    monkeypatch.setattr(prepared, "start", lambda: calls.append(prepared._planned))
    monkeypatch.setattr(running, "prepared", prepared)
    monkeypatch.setattr(running, "machine_here", lambda: None)
    monkeypatch.setattr(running, "schedule_of", lambda *_: SimpleNamespace(peak=peak))
    running.prepare_first(cast(Plan, None), NODES[1:])
    assert calls == started
