"""Largest relative differences between us and TRL: `python -m tests.agreement.compare` writes
docs/reference/agreement.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.agreement import material, ours
from tests.agreement.page import PAGE

GOLDENS = Path(__file__).with_name("trl.json")
# fp32 rounding: with SSE, AVX2 and AVX-512 kernels the largest difference is 5e-6; the mildest change that
# the test plants makes 5e-4.
TOLERANCE = 2e-5


def goldens() -> dict[str, Any]:
    return json.loads(GOLDENS.read_text())


def largest(values: Iterable[float]) -> float:
    """The largest of `values`; nan when one of them is."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def relative(ours: list[float], theirs: list[float]) -> float:
    """Largest |ours - theirs| / |theirs|, number by number."""
    return largest(abs(a - b) / abs(b) if a != b else 0.0 for a, b in zip(ours, theirs, strict=True))


def of_vector(ours: list[float], theirs: list[float]) -> float:
    """Largest |ours - theirs| over the largest |theirs|: for entries that may be near 0."""
    return largest(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / largest(map(abs, theirs))


def of_curves(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Of the losses, gradient norms and learning rates of all steps (KTO: of the KL too), and of the way each
    weight went."""
    assert ours["moved"].keys() == theirs["moved"].keys()
    found = {name: relative(ours[name], theirs[name]) for name in ("loss", "grad_norm", "learning_rate")}
    found["moved"] = relative(list(ours["moved"].values()), [theirs["moved"][name] for name in ours["moved"]])
    return found | ({"kl": of_vector(ours["kl"], theirs["kl"])} if "kl" in theirs else {})


def of_losses(ours: dict[str, Any], theirs: dict[str, Any], with_loss: bool = True) -> dict[str, float]:
    """Of the advantages, the loss, the norm of each weight's gradient and the whole gradient of the last
    norm."""
    assert ours["norms"].keys() == theirs["norms"].keys()
    norms = relative(list(ours["norms"].values()), [theirs["norms"][name] for name in ours["norms"]])
    found = {"advantages": of_vector(ours["advantages"], theirs["advantages"])}
    if with_loss:
        found["loss"] = relative([ours["loss"]], [theirs["loss"]])
    return found | {"gradient": largest([norms, of_vector(ours["last"], theirs["last"])])}


def of_odds(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    return {
        "loss": relative([ours["loss"]], [theirs["loss"]]),
        "gradient": of_vector(ours["last"], theirs["last"]),
    }


def check_material(folder: Path, recorded: dict[str, Any]) -> None:
    """ValueError when the material in `folder` is not what TRL was given."""
    found = material.digest(folder)
    if found != recorded["digest"]:
        raise ValueError(
            f"the weights, rows or their order made here have the digest {found}, TRL was given"
            f" {recorded['digest']}: record the goldens again (python -m tests.agreement.record_trl)"
        )


def main() -> None:
    recorded = goldens()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "material"
        folder.mkdir()
        material.make(folder)
        check_material(folder, recorded)
        curves = []
        losses = []
        for number, (name, case) in enumerate(material.CASES.items()):
            theirs = recorded["curves"][name]
            found = of_curves(ours.train(case, folder, Path(place) / str(number)), theirs)
            path = f"{theirs['loss'][0]:.3f} to {theirs['loss'][-1]:.3f}"
            columns = [
                f"{found[column]:.1e}" if column in found else ""
                for column in ("loss", "grad_norm", "moved", "kl")
            ]
            curves.append([name, f"{case.learning_rate:g}", path, *columns])
        for name, rl in material.RL.items():
            found = of_losses(
                ours.rl_loss(rl, folder, recorded["tensors"]), recorded["losses"][name], not rl.on_policy
            )
            losses.append(
                [
                    name,
                    *(
                        f"{found[column]:.1e}" if column in found else ""
                        for column in ("advantages", "loss", "gradient")
                    ),
                ]
            )
    found = of_odds(ours.odds_ratio(material.odds()), recorded["odds"])
    losses.append(["orpo, odds ratio", "", f"{found['loss']:.1e}", f"{found['gradient']:.1e}"])

    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    text = PAGE.format(
        date=datetime.date.today(),
        theirs=", ".join(f"{name} {version}" for name, version in recorded["versions"].items()),
        ours=", ".join(f"{name} {version}" for name, version in versions.items())
        + f", cpu {torch.backends.cpu.get_cpu_capability()}",
        steps=material.STEPS,
        batch=material.BATCH,
        rows=material.ROWS,
        seed=material.SEED,
        betas=material.OPTIMISER["betas"],
        decay=material.OPTIMISER["weight_decay"],
        norm=material.OPTIMISER["max_norm"],
        tolerance=f"{TOLERANCE:.0e}",
        curves=table(
            [
                "algorithm",
                "learning rate",
                "TRL's loss, first to last step",
                "loss",
                "gradient norm",
                "weights moved",
                "KL",
            ],
            curves,
        ),
        losses=table(["algorithm", "advantages", "loss", "gradient"], losses),
    )
    target = Path(__file__).parents[2] / "docs" / "reference" / "agreement.md"
    target.write_text(text)
    print(f"wrote {target}")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
