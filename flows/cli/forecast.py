"""Prints estimates for `alignflow plan`: memory per GPU and seconds per iteration."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape

from flows.cli.show import say, table_of
from rlhf_core.config import KINDS, PPO, Optimised, Ranks, Trainable
from rlhf_core.config.rewards import RewardSource
from rlhf_core.config.training.optimised import HALF
from rlhf_core.forecast.by_phase import training_by_phase
from rlhf_core.forecast.fitting_passes import alternatives, fields_of
from rlhf_core.forecast.hardware import GIB, LINK, Gpu, nodes_of
from rlhf_core.forecast.image_data import seen_size, seen_sizes
from rlhf_core.forecast.memory import USABLE
from rlhf_core.forecast.placements import Placement, choose, details, on_fewest, with_fields
from rlhf_core.forecast.seconds import seconds_of_pass
from rlhf_core.forecast.zero_stage import (
    at_start,
    peak_of_training,
    size_of_folder,
    stage_of_training,
    starts,
    starts_of_ppo,
)
from rlhf_core.hub.model_config import Size
from rlhf_core.preflight.machine_checks import needs
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.recipe.yaml_text import dump

BF16 = "bfloat16"


def show_forecast(console: Console, planned: Plan, count: int, gpu: Gpu) -> None:
    """Prints each training stage's memory on its fullest GPU and, for PPO, the phases of every placement on
    `count` GPUs."""
    told = on_cpus(planned)
    if told:
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    nodes = nodes_of(count, gpu)
    on = (
        f", {nodes} nodes with {gpu.network / LINK / 1e9:.0f} GB/s between them (--nodes, --network)"
        if nodes > 1
        else ""
    )
    how = "--gpu, or --gpu-memory, --flops, --bandwidth"
    console.print(f"estimates for {gpu} ({how}){on}; bf16, answers of full length", highlight=False)
    for node in planned.nodes:
        if isinstance(node.config, PPO) and node.config.engine.kind != "vllm":
            told = f"{node.name}: estimates exist only for vLLM engines, but kind is"
            say(f"{told} {node.config.engine.kind}", console)
        elif isinstance(node.config, PPO):
            sizes = sizes_of(planned, node, node.config)
            fewest, found = on_fewest(node.config, count, sizes, gpu)
            if fewest < count:
                console.print(
                    f"{escape(node.name)}: {fewest} GPU(s) are as fast as {count} for models of these sizes",
                    highlight=False,
                )
            _show_ppo(console, node.name, node.config, found, gpu, sizes)
        elif isinstance(node.config, Trainable):
            config = node.config
            size = seen_size(config, model_size(planned, node, getattr(config, KINDS[node.kind].start)))
            stage = stage_of_training(config, size, gpu.memory).stage
            held = peak_of_training(config, size, stage, gpu.memory)
            zero = f", zero_stage {stage}" if config.sharding is None else ""
            line = (
                f"[bold]{escape(node.name)}[/]: {held / GIB:.1f} GiB per GPU on {config.ranks.world_size}"
                f" GPU(s){zero}"
            )
            if held > USABLE * gpu.memory:
                line += (
                    f" [red]but a GPU has {gpu.memory / GIB:.0f}: {_what_fits(config, size, stage, gpu)}[/]"
                )
            if config.dtype not in HALF:
                line += f" [red]with dtype: {BF16}, but the recipe has {config.dtype}[/]"
            console.print(line, highlight=False)
            if size.encoder is not None:
                encoder = f"with the image encoder of {size.encoder.parameters / 1e9:.2f} billion weights"
                console.print(f"  {encoder}, frozen and whole on each GPU", highlight=False)
            peaks = training_by_phase(config, size, stage, gpu)
            told = ", ".join(
                f"{phase} {each.gpu / GIB:.1f} / {each.host / GIB:.1f}" for phase, each in peaks.items()
            )
            console.print(f"  GiB per GPU / per host of a node: {told}", highlight=False)


def on_cpus(planned: Plan) -> str:
    """Returns a sentence that names the stages that run on CPUs, because the estimates apply only to GPUs; ""
    if there are no such stages."""
    trained = [node for node in planned.nodes if isinstance(node.config, PPO | Trainable)]
    without = [node.name for node in trained if not needs(node.config).gpus]
    if not without:
        return ""
    if len(without) == len(trained):
        who = "this recipe runs on CPUs"
    else:
        who = f"{', '.join(without)} {'run' if len(without) > 1 else 'runs'} on CPUs"
    return (
        f"{who}: the figures below are for GPUs, and apply only with `gpus: 1` in ranks and engines; there"
        " are no estimates for CPUs"
    )


def nodes_in(planned: Plan, count: int) -> int | None:
    """Returns the number of nodes for `count` GPUs if groups of the recipe span several nodes; None if the
    recipe does not determine it."""
    groups = [wanted for node in planned.nodes for turn in node.config.turns for wanted in turn.values()]
    on_each = max(
        (ranks.num_ranks_per_node for ranks in groups if isinstance(ranks, Ranks) and ranks.num_nodes > 1),
        default=0,
    )
    return count // on_each if on_each and count % on_each == 0 else None


def sizes_of(planned: Plan, node: Node, config: PPO) -> dict[str, Size]:
    """Returns the size of each role's model. Raises ValueError for the same reasons as `model_size`."""
    names = {"actor": config.actor} | config.read_names
    names |= {judge.group: judge.model.model for judge in config.own_judges}
    if config.has_critic:
        names["critic"] = config.critic or config.reward_models[0].model
    return seen_sizes(config, {role: model_size(planned, node, name) for role, name in names.items()})


def model_size(planned: Plan, node: Node, name: str) -> Size:
    """Returns the size of a model that a stage names: the size of the model in its folder or, if another
    stage trains the model, the size of the other stage's start model.

    Raises ValueError when the folder's config.json has no sizes.
    """
    while name not in node.models:
        node = planned[node.stages[name]]
        name = getattr(node.config, KINDS[node.kind].start)
    return size_of_folder(node.models[name])


def _show_ppo(
    console: Console, name: str, config: PPO, found: list[Placement], gpu: Gpu, sizes: Mapping[str, Size]
) -> None:
    phases = list(dict.fromkeys(phase for placement in found for phase in placement.seconds))
    numbers = ("GiB, fullest GPU", *phases, "seconds per iteration")
    table = table_of("placement", *numbers, title=f"{name}: placements", right=numbers)
    chosen = choose(found, gpu)
    for placement in found:
        seconds = [
            f"{placement.seconds[phase]:.1f}" if phase in placement.seconds else "" for phase in phases
        ]
        held = f"{placement.peak / GIB:.1f}" + (
            f", {placement.lacking / GIB:.1f} too little for vLLM" if placement.lacking > 0 else ""
        )
        held += f", {placement.beyond:g} GPUs too many" if placement.beyond > 0 else ""
        mark = "" if placement.fits(gpu) else "[red]"
        if placement is chosen:
            mark = "[green]"
        table.add_row(
            f"{mark}{escape(placement.name)}", f"{mark}{held}", *seconds, f"{mark}{placement.total:.1f}"
        )
    if not found:
        console.print(
            f"{escape(name)}: no placement suits its batch sizes and switches on this number of GPUs",
            highlight=False,
        )
        return
    console.print(table)
    shown = chosen or min(found, key=lambda placement: (placement.beyond > 0, placement.peak))
    _show_details(console, name, config, shown, gpu, sizes)
    if chosen is None:
        closest = with_fields(config, shown)
        names, needed = max(
            starts_of_ppo(closest.model_copy(update={"dtype": BF16}), sizes), key=lambda found: found[1]
        )
        together = f"because at their start {', '.join(names)} take {needed / GIB:.1f} GiB of the same GPU"
        loading = _too_large(at_start(needed) if len(names) == 1 else together, needed, gpu)
        why = loading or f"not even with shorter passes: {_to_try(closest, 'more GPUs')}"
        console.print(f"none of these fits {gpu.memory / GIB:.0f} GiB, {why}", highlight=False)
        return
    fields = _to_write(config, chosen)
    choice = (
        f"choose [green]{escape(chosen.name)}[/]: the fastest that fits, or as good as it (within 5 %) with"
        " more memory left"
    )
    if not fields:
        console.print(f"{choice}. The recipe has it already", highlight=False)
        return
    console.print(f"{choice}. In the recipe, under {escape(name)}:", highlight=False)
    lines = dump(fields, default_flow_style=None, width=120)
    console.print(textwrap.indent(lines.rstrip(), "  "), markup=False, highlight=False, soft_wrap=True)


def _show_details(
    console: Console, name: str, config: PPO, placement: Placement, gpu: Gpu, sizes: Mapping[str, Size]
) -> None:
    """Prints a placement phase by phase: seconds at the best and worst measured rates, and GPU and host
    memory."""
    (fast, typical, slow), memory = details(config, placement, sizes, gpu)
    numbers = ("seconds", "range", "GiB, fullest GPU", "GiB, host of a node")
    table = table_of("phase", *numbers, title=f"{name}, {placement.name}: phases", right=numbers)
    for phase in dict.fromkeys([*memory, *typical]):
        seconds = (
            [f"{typical[phase]:.1f}", f"{fast[phase]:.1f} to {slow[phase]:.1f}"]
            if phase in typical
            else ["", ""]
        )
        held = [f"{size / GIB:.1f}" for size in memory[phase]] if phase in memory else ["", ""]
        table.add_row(phase, *seconds, *held)
    table.add_row(
        "per iteration",
        f"{sum(typical.values()):.1f}",
        f"{sum(fast.values()):.1f} to {sum(slow.values()):.1f}",
        "",
        "",
    )
    console.print(table)


def _to_write(config: PPO, chosen: Placement) -> dict[str, Any]:
    """Returns the placement's fields that differ from the recipe, without the defaults inside groups."""
    fields = chosen.fields | {"dtype": BF16}  # the estimates are for bf16
    changed = with_fields(config, chosen._replace(fields=fields))
    given = config.model_dump(mode="json")
    whole = changed.model_dump(mode="json")
    short = changed.model_dump(mode="json", exclude_defaults=True)
    short["reward"] = [_source(source) for source in changed.reward]
    return {field: short.get(field, whole[field]) for field in fields if whole[field] != given[field]}


def _source(source: RewardSource) -> dict[str, Any]:
    named = source.model_dump(
        mode="json",
        include={"model", "function", "url", "verifier"} if source.kind != "environment" else {"kind"},
    )
    return named | source.model_dump(mode="json", exclude_defaults=True)


def _what_fits(config: Trainable, size: Size, stage: int, gpu: Gpu) -> str:
    """Returns the recipe fields for the fastest passes that fit; tries sharded weights if nothing fits with
    the stage's own sharding."""
    sharded = config.ranks.world_size > 1 and not config.quantized  # 4-bit weights are not sharded
    for tried in dict.fromkeys((stage, config.shardings[-1].stage if sharded else stage)):
        peaks = {
            each: peak_of_training(config, size, tried, gpu.memory, each) for each in alternatives(config)
        }
        fitting = [each for each, held in peaks.items() if held <= USABLE * gpu.memory]
        if fitting:
            head = KINDS[config.stage].has_vocabulary
            twice = head and getattr(config, "fp32_head", False)
            seconds = partial(seconds_of_pass, size, zero_stage=tried, head=head, gpu=gpu, logits_twice=twice)
            best = min(fitting, key=lambda each: seconds(what=each) / each.tokens)
            fields = fields_of(best, config) | ({} if tried == stage else {"zero_stage": tried})
            return (
                f"with {', '.join(f'{field}: {value}' for field, value in fields.items())} it is"
                f" {peaks[best] / GIB:.1f}"
            )
    needed = starts(config.model_copy(update={"dtype": BF16}), {"": size})[""]
    return (
        _too_large(at_start(needed), needed, gpu)
        or f"no pass is short enough: {_to_try(config, 'more ranks')}"
    )


def _to_try(config: Optimised, more: str) -> str:
    """Returns the memory-saving options that the recipe does not use yet, including `more` ranks or GPUs."""
    frozen = (
        isinstance(config, PPO)
        and config.read_only
        and not (config.ref_reward_shard or config.ref_reward_offload)
    )
    models = len(config.trained_ranks)
    tries = {
        "a larger sequence_parallel_size": any(
            ranks.world_size > config.sequence_parallel_size for ranks in config.trained_ranks.values()
        ),
        "no zero_hpz": config.zero_hpz,
        "adam_offload": config.lora is None and len(config.offloaded("adam")) < models,
        "param_offload": not config.quantized and len(config.offloaded("param")) < models,
        "ref_reward_shard": frozen,
        more: True,
        "lora": config.lora is None,
    }
    return f"{', '.join(name for name, missing in tries.items() if missing)} or a smaller model"


def _too_large(told: str, needed: float, gpu: Gpu) -> str:
    """Returns `told` with advice for a model too large for a GPU to load; "" if the `needed` bytes fit."""
    if needed <= USABLE * gpu.memory:
        return ""
    return f"{told}: more ranks with zero_stage 3, GPUs with more memory, or a smaller model"
