"""What a resume state costs the steps beside which it is written, against one that training waits for: one
rank, plain AdamW.

    python tests/benchmarks/resume_states.py --out FOLDER [--hidden 768 --layers 12] [--every 8] [--rounds 3]
    [--json OUT]

A round trains three times `--every` steps on random tokens: without a state, with one that training waits for
after the first step, and with one that is written beside the steps. A state's cost is the seconds of its part
of the round above those of the part without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from record import add_options, figure, save

from rlhf_core.config.training.trainable import Trainable
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.train_loop import Saving

TOKENS = 64
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser, "resume-states")
    arguments = parser.parse_args()
    engine = make_engine(arguments)
    saving = Saving(engine, RunDir(arguments.out), 1)
    batch = tokens(arguments, engine.device)
    costs: dict[str, list[float]] = {"waits": [], "beside": []}
    plain = list[float]()
    number = 0
    one_step(engine, batch)
    for _ in range(arguments.rounds):
        for mode in ("none", *costs):
            start = time.monotonic()
            for step in range(arguments.every):
                one_step(engine, batch)
                if step == 0 and mode != "none":
                    number += 1
                    saving.begin(number, {})
                    if mode == "waits":
                        saving.finish()
            seconds = time.monotonic() - start
            (
                plain.append(seconds)
                if mode == "none"
                else costs[mode].append(seconds - statistics.median(plain))
            )
            saving.finish()  # a state that took longer than the steps
    size = sum(file.stat().st_size for file in arguments.out.rglob("rank-*"))
    every = 60 * Trainable.model_fields["save_minutes"].default
    figures = {
        "a state": figure(round(size / GIB, 2), "GiB", None),
        "a step": figure(round(statistics.median(plain) / arguments.every, 3), "s", None),
    }
    for mode, what in (("waits", "a state that training waits for"), ("beside", "a state beside the steps")):
        cost = statistics.median(costs[mode])
        figures[what] = figure(round(cost, 2), "s")
        figures[f"{what}, of the run at the default cadence"] = figure(round(100 * cost / every, 2), "%")
    for name, value in figures.items():
        print(f"{name}: {value['value']} {value['unit']}")
    save(arguments, "What a resume state costs the steps beside which it is written", figures)


def make_engine(arguments: argparse.Namespace) -> TorchEngine:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = arguments.hidden // 64
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=arguments.vocabulary,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    return TorchEngine(model.train(), AdamW((0.9, 0.95), 0.0, 1.0))


def tokens(arguments: argparse.Namespace, device: torch.device) -> torch.Tensor:
    return torch.randint(arguments.vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(
        device
    )


def one_step(engine: TorchEngine, batch: torch.Tensor) -> None:
    loss = torch.nn.functional.cross_entropy(engine(batch).logits[0, :-1].float(), batch[0, 1:])
    engine.backward(loss, last=True)
    engine.step(1e-5)  # returns the norm, for which it waits


if __name__ == "__main__":
    main()
