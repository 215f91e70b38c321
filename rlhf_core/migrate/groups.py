"""Translates the GPUs of a stage: PPO's worker groups and engines, the ranks of other stages, and batch sizes
that fit the ranks."""

from __future__ import annotations

import math

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.flag_values import true, whole
from rlhf_core.migrate.script_inputs import is_model, rewards_of

GROUPS = {
    "actor": "actor_ranks",
    "critic": "critic_ranks",
    "ref": "reference_ranks",
    "reward": "reward_ranks",
}


def read_groups(draft: Draft) -> None:
    """Reads PPO's GPU groups. `--num_nodes` and `--num_gpus_per_node` apply to all groups; models that
    share GPUs get groups of the same size."""
    nodes = _count(draft, "num_nodes")
    per_node = _count(draft, "num_gpus_per_node")
    scored = any(map(is_model, rewards_of(draft)))
    here = [
        role
        for role in GROUPS
        if (role != "critic" or draft.get("advantage_estimator") == "gae") and (role != "reward" or scored)
    ]
    sizes: dict[str, tuple[int, int]] = {}
    leader = _leaders(draft, here)
    for role in GROUPS:
        given = (_count(draft, f"{role}_num_nodes"), _count(draft, f"{role}_num_gpus_per_node"))
        if role not in here:
            continue
        size = (given[0] or nodes or 1, given[1] or per_node or 8)
        if role in leader and size != sizes[leader[role]]:
            size = sizes[leader[role]]
            if any(given):
                text = (
                    f"{GROUPS[role]}: {size[0]} x {size[1]}, the size of the {leader[role]}'s group, whose"
                    " GPUs it shares"
                )
                draft.note("approximated", f"--{role}_num_nodes, --{role}_num_gpus_per_node", text)
        sizes[role] = size
        draft.put(GROUPS[role], {"num_nodes": size[0], "num_ranks_per_node": size[1], "gpus": 1.0})
    _engines(
        draft,
        math.prod(sizes["actor"]),
        "colocate_all" in draft.left,
        nodes is not None or per_node is not None,
    )


def read_async(draft: Draft) -> None:
    """Reads --async_train if the stage's other settings, which must be read before, allow it."""
    flag = draft.take("async_train")
    if flag is None:
        return
    if not true(flag.words):
        draft.translate(flag, "max_staleness", 0)
        return
    conflicts = [name for name in ("colocate_all", "engine.sleep") if draft.get(name)]
    filtering = draft.get("dynamic_filtering")
    if filtering and "colocate_critic_reward" in (*draft.left, *draft.fields):
        conflicts.append("dynamic_filtering and colocate_critic_reward")
    if conflicts:
        draft.note("dropped", flag, f"max_staleness does not go with {' and '.join(conflicts)}")
        return
    without = draft.get("sampler_is") == "off"
    if without:
        draft.put("sampler_is", "truncate")
    draft.translate(
        flag, "max_staleness", 1, "answers one update old, with sampler_is: truncate" if without else ""
    )


def _leaders(draft: Draft, here: list[str]) -> dict[str, str]:
    """Maps the roles that share another role's GPUs to that role."""
    if "colocate_critic_reward" in draft.left and not {"critic", "reward"} <= set(here):
        draft.note(
            "dropped", draft.left.pop("colocate_critic_reward"), "there is no critic, or no reward model"
        )
    if "colocate_all" in draft.left:
        for flag in ("colocate_actor_ref", "colocate_critic_reward"):
            given = draft.take(flag)
            if given:
                draft.note("translated", given, "part of colocate_all")
        return dict.fromkeys(here[1:], "actor")
    pairs = {"colocate_actor_ref": ("ref", "actor"), "colocate_critic_reward": ("reward", "critic")}
    return {role: leader for flag, (role, leader) in pairs.items() if flag in draft.left}


def _engines(draft: Draft, gpus: int, shared: bool, one_group: bool) -> None:
    """Sets the number of vLLM engines. If the engines share the models' GPUs, there is one per
    `tensor_parallel_size` GPUs."""
    parallel = max(1, _whole_or(draft.left.get("vllm_tensor_parallel_size"), 1))
    draft.put("engine.gpus", 1.0)
    wanted = _whole_or(draft.left.get("vllm_num_engines"), 0)
    if wanted and not (shared and wanted * parallel != gpus):
        return
    flag = draft.take("vllm_num_engines")
    shown = flag or "(no --vllm_num_engines)"
    if shared or (one_group and not flag):
        engines = max(1, gpus // parallel)
        draft.put("engine.num_engines", engines)
        text = f"engine.num_engines: {engines}, as many as fit on the models' GPUs"
        draft.note("approximated" if flag else "translated", shown, text)
    else:
        draft.note(
            "approximated",
            shown,
            "engine.num_engines: 1, as sampling is always by vLLM; give it as many GPUs as there are",
        )


def _whole_or(flag: Flag | None, other: int) -> int:
    try:
        return whole(flag.words) if flag else other
    except ValueError:
        return other


def _count(draft: Draft, name: str) -> int | None:
    flag = draft.take(name)
    if flag is None:
        return None
    value = _whole_or(flag, 0)
    if value < 1:
        draft.note("dropped", flag, "this is not a number of machines or GPUs above 0; the default is used")
        return None
    draft.note("translated", flag, GROUPS.get(name.partition("_num_")[0], "all groups"))
    return value


def read_ranks(draft: Draft, given: tuple[int | None, int | None], gpus: int) -> None:
    """Sets the ranks of a stage that torchrun or deepspeed starts. `given`: nodes and GPUs per node; `gpus`:
    default number of GPUs per node."""
    nodes = given[0] or 1
    per_node = given[1] or gpus
    draft.put("ranks", {"num_nodes": nodes, "num_ranks_per_node": per_node, "gpus": 1.0})
    if given[1] is None:
        draft.note(
            "approximated",
            "(all GPUs of the machine)",
            f"ranks: {per_node} GPUs on a machine, from --gpus of alignflow migrate",
        )
    else:
        draft.note("translated", "(the launcher's processes)", f"ranks: {nodes} x {per_node}")


def fit(draft: Draft) -> None:
    """Changes zero_stage and the batch sizes to fit the ranks, as a recipe requires."""
    names = ("actor_ranks", "critic_ranks") if draft.kind == "ppo" else ("ranks",)
    worlds = [
        r["num_nodes"] * r["num_ranks_per_node"] for r in (draft.fields.get(name) for name in names) if r
    ]
    world = math.lcm(*worlds) if worlds else 1
    if draft.get("zero_stage") == 0 and (world > 1 or draft.get("adam_offload")):
        draft.put("zero_stage", 1)
        draft.note(
            "approximated",
            "--zero_stage 0",
            "zero_stage: 1, the same on several ranks with the optimiser's state sharded",
        )
    batch = draft.get("train_batch_size")
    micro = draft.fields.get("micro_train_batch_size")  # where the script leaves it out, passes have tokens
    samples = (
        draft.get("rollout_batch_size") * draft.get("n_samples_per_prompt") if draft.kind == "ppo" else 0
    )
    fitting = batch if not batch % world else -(-batch // world) * world
    if samples and samples % fitting:
        divisors = [size for size in range(world, fitting + 1, world) if samples % size == 0]
        if divisors:
            fitting = divisors[-1]
        else:
            prompts = math.lcm(fitting, draft.get("n_samples_per_prompt")) // draft.get(
                "n_samples_per_prompt"
            )
            prompts = -(-draft.get("rollout_batch_size") // prompts) * prompts
            draft.put("rollout_batch_size", prompts)
            draft.note(
                "approximated",
                "--rollout_batch_size",
                f"rollout_batch_size: {prompts}, a whole number of optimiser steps",
            )
    if fitting != batch:
        draft.put("train_batch_size", fitting)
        draft.note(
            "approximated",
            "--train_batch_size",
            f"train_batch_size: {fitting}, which {world} ranks share evenly",
        )
    if micro is not None and fitting % (micro * world):
        micro = next(
            size for size in range(min(micro, fitting // world), 0, -1) if fitting % (size * world) == 0
        )
        draft.put("micro_train_batch_size", micro)
        draft.note(
            "approximated",
            "--micro_train_batch_size",
            f"micro_train_batch_size: {micro}, so that {world} ranks make whole passes",
        )
