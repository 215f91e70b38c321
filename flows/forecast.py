"""`alignflow plan`: memory of each card and seconds of an iteration, before anything starts."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf_core.config import PPO, Trainable
from rlhf_core.forecast.memory import GIB
from rlhf_core.forecast.placements import Placement, choose, placements
from rlhf_core.forecast.seconds import Card
from rlhf_core.forecast.sizes import Size, size_of
from rlhf_core.forecast.zero import peak_of_training, stage_of_training
from rlhf_core.names import TRAINED_FROM
from rlhf_core.plan import Node, Plan
from rlhf_core.snapshots import described

SOURCE = {**TRAINED_FROM, "reward_model": "model"}  # the field that names what a stage starts from


def show_forecast(console: Console, planned: Plan, count: int, card: Card) -> None:
    """Every stage that trains: its fullest card, and for PPO the phases and what else could be done on `count` cards."""
    told = f"{card.memory / GIB:.0f} GiB, {card.flops / 1e12:.0f} TFLOP/s and {card.bandwidth / 1e12:.1f} TB/s a card"
    console.print(f"estimates for {told} (--card-memory, --flops, --bandwidth); bf16, answers of full length", highlight=False)
    for node in planned.nodes:
        if isinstance(node.config, PPO):
            _show_ppo(console, node.name, placements(node.config, count, sizes_of(planned, node, node.config), card), card)
        elif isinstance(node.config, Trainable):
            size, config = model_size(planned, node, getattr(node.config, SOURCE[node.kind])), node.config
            chosen = stage_of_training(config, size, card.memory)
            held = peak_of_training(config, size, chosen.stage, card.memory) / GIB
            zero = f", zero_stage {chosen.stage}" if config.zero_stage == "auto" else ""
            told = f"[bold]{escape(node.name)}[/]: {held:.1f} GiB a card on {config.ranks.world_size} card(s){zero}{_too_much(held, card)}"
            console.print(told, highlight=False)


def sizes_of(planned: Plan, node: Node, config: PPO) -> dict[str, Size]:
    """The size of each role's model."""
    names = {"actor": config.actor, "reference": config.reference or config.actor}
    names |= {f"reward:{source.title}": source.model for source in config.reward_models}
    if config.has_critic:
        names["critic"] = config.critic or config.reward_models[0].model
    return {role: model_size(planned, node, name) for role, name in names.items()}


def model_size(planned: Plan, node: Node, name: str) -> Size:
    """The size of the model that a stage names: of its folder, or of what the stage that makes it starts from."""
    while name not in node.models:
        node = planned[node.stages[name]]
        name = getattr(node.config, SOURCE[node.kind])
    place = node.models[name]
    return size_of(place if Path(place).is_dir() else str(described(place)))


def _show_ppo(console: Console, name: str, found: list[Placement], card: Card) -> None:
    table = Table(title=f"{name}: placements", title_justify="left", box=None, pad_edge=False)
    for column in ("placement", "GiB, fullest card", *dict.fromkeys(phase for p in found for phase in p.seconds), "seconds an iteration"):
        table.add_column(column, justify="left" if column == "placement" else "right", overflow="fold")
    chosen = choose(found, card)
    for placement in found:
        seconds = [f"{placement.seconds[c]:.1f}" if c in placement.seconds else "" for c in (str(c.header) for c in table.columns[2:-1])]
        held = f"{placement.peak / GIB:.1f}" + (f", vLLM lacks {placement.lacking / GIB:.1f}" if placement.lacking > 0 else "")
        mark = "[green]" if placement is chosen else "" if placement.fits(card) else "[red]"
        table.add_row(f"{mark}{escape(placement.name)}", f"{mark}{held}", *seconds, f"{mark}{placement.total:.1f}")
    console.print(table)
    if chosen is None:
        console.print(f"none of these fits {card.memory / GIB:.0f} GiB: more cards, fewer tokens a pass, or gradient_checkpointing: true")
        return
    fields = ", ".join(f"{field}: {value}" for field, value in chosen.fields.items() if value not in (False, [])) or "leave it as it is"
    console.print(f"choose [green]{escape(chosen.name)}[/]: the fastest that fits. {escape(fields)}", highlight=False)


def _too_much(held: float, card: Card) -> str:
    more = "fewer tokens a pass, gradient_checkpointing, a higher zero_stage or more ranks"
    return f" [red]and a card has {card.memory / GIB:.0f}: {more}[/]" if held > card.memory / GIB else ""
