"""Writes docs/reference/families.md from the results of `make families`."""

from __future__ import annotations

from typing import Any

from rlhf_core.system.markdown_table import table

STAGES = ("sft", "reward_model", "dpo", "kto")
HEAD = """# Model families

Written by `make families` (tests/families), which measures a random model of each family (seed 0): small ones in fp32 on a CPU; on a GPU in
bfloat16, with the heads, states and vocabularies that are published. Logits are scaled to an entropy of 2 nats a token.

- *rows*: packed, or one document a row. *packed*: largest distance of log-probs, packed against single rows.
- *export*: of a model without training: as the base (names, shapes, dtypes and values of tensors, config.json), or what is not.
- *stages*: those that ran two steps with budgets of tokens: SFT (S), reward model (R), DPO (D), KTO (K); A: adapters.
- *rounding*: mean distance in nats of the trainer's own log-probs in bfloat16 from those in float32, which a gap on a GPU is compared with.
- *sent*: mean distance of log-probs, vLLM's against the trainer's, after a weight sync; *before it*: of weights that were not sent;
  *planted*: the smallest that one fault in the trainer's model makes (rotary frequencies, a norm, an expert, no cap).
- *sampled*: mean distance on vLLM's own answers; *replayed*: with the experts that vLLM chose; *again*: as *sent*, after a step on these
  answers and a second sync.
"""
PICTURED = """## With images

Of small models in fp32, on documents with images of random colours and one without, packed in a row. All but *export* are largest distances:

- *log-probs*: in nats, from those of transformers' whole model, which reads one document at a time.
- *gradients*: of the image encoder with its projector, from those of the whole model, as a share of their norm.
- *export*: of a model without training, whose encoder is trained.
- *sent*: in nats, of the transformers engine's log-probs from the trainer's, after a sync that sends the encoder; *before it*: without it.
"""


def page(cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    parts = [HEAD]
    for name, results in (("cpu", cpu), ("gpu", gpu)):
        if results:
            parts += [
                f"## {'On a CPU' if name == 'cpu' else 'On a GPU'}\n",
                _about(results),
                _families(results["families"]),
            ]
            faults = _faults(results["families"])
            if faults:
                parts.append(faults)
    if "pictured" in cpu:
        parts += [PICTURED, _about(cpu["pictured"]), _pictured(cpu["pictured"]["families"])]
    if "classes" in cpu:
        parts.append(_classes(cpu["classes"]))
    return "\n".join(parts)


def _about(results: dict[str, Any]) -> str:
    named = ", ".join(f"{name} {value}" for name, value in results["versions"].items() if name != "device")
    return f"{results['versions']['device']}, {named}, {results['date']}.\n"


def _families(families: dict[str, Any]) -> str:
    rows = [{"family": name, **_cells(found)} for name, found in sorted(families.items())]
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return table(columns, ([row[name] for name in columns] for row in rows))


def _cells(found: dict[str, Any]) -> dict[str, object]:
    told = found.get("vllm", {})
    ran = "".join(stage[0].upper() for stage in STAGES if _stages(found).get(stage) == "yes") + "A" * (
        found.get("adapters") == "yes"
    )
    cells = {
        name: found.get(key)
        for name, key in (("rows", "rows"), ("packed", "packed minus single"), ("export", "export"))
    }
    cells |= {"stages": ran, "rounding": found.get("rounding")}
    cells |= {
        name: told.get(key, {}).get("mean") for name, key in (("sent", "sent"), ("before it", "not sent"))
    }
    cells["planted"] = min(told.get("planted", {}).values(), default=None)
    means = (("sampled", "sampled"), ("replayed", "sampled, replayed"), ("again", "sent again"))
    return cells | {name: told.get(key, {}).get("mean") for name, key in means}


def _pictured(families: dict[str, Any]) -> str:
    columns = ("log-probs", "gradients", "export", "sent", "before it", "failed")
    used = [name for name in columns if any(name in found for found in families.values())]
    rows = ((name, *(found.get(column) for column in used)) for name, found in sorted(families.items()))
    return table(("family", *used), rows)


def _stages(found: dict[str, Any]) -> dict[str, str]:
    return found["stages"] if isinstance(found.get("stages"), dict) else {}


def _faults(families: dict[str, Any]) -> str:
    """What did not work, in its own words."""
    lines = []
    for name, found in sorted(families.items()):
        said = {"": found.get("failed", "yes"), "adapters": found.get("adapters", "yes"), **_stages(found)}
        said |= {"vLLM": found.get("engine", "yes")}
        said |= {"reward model": found["reward model"]} if "reward model" in found else {}
        lines += [f"- {name}{', ' * bool(what)}{what}: {why}" for what, why in said.items() if why != "yes"]
    return "\n".join(["What did not work, as it was said:\n", *lines, ""]) if lines else ""


def _classes(classes: dict[str, Any]) -> str:
    kinds = sorted({kind for found in classes.values() for kind in found["outcomes"]})
    counts = table(
        ("use", *kinds),
        ((use, *(found["outcomes"].get(kind, 0) for kind in kinds)) for use, found in classes.items()),
    )
    refused = table(("model_type", "sentence"), sorted(classes["policy"]["refused"].items()))
    about = (
        "Every kind of config in transformers that names a causal or an image-text model, tried as `validate"
        " --here` tries those that are not in the tables above. *not tried*: no small model of the class"
        " could be made.\n"
    )
    return "\n".join(["## Other classes\n", about, counts, "Refused as a policy:\n", refused])
