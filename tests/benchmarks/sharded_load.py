"""Peak memory of each rank of a ZeRO-3 group while a model is loaded, trained, saved, exported and resumed:
gloo ranks on this machine.

    python tests/benchmarks/sharded_load.py --out FOLDER [--ranks 4] [--hidden 1024 --layers 24 --vocabulary
    48000] [--whole] [--json OUT]

The model is a Llama of random weights in bf16, 0.41e9 parameters by default. Each rank is a process of its
own. Its peak is VmHWM, which is reset between the parts; that of a process with the libraries alone is a
figure of its own, and subtracted from none. `--whole`: each rank loads the whole model, which DeepSpeed cuts
afterwards. Weights are fetched again for the backward pass, as those of large models are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import add_options, figure, save

PARTS = ("libraries", "load", "engine", "step", "save", "export", "resume")
TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=48000)
    parser.add_argument("--whole", action="store_true", help="each rank loads the whole model")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # of a child: NUMBER/PART
    add_options(parser, "sharded-load")
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = make_model(arguments)
    ranks = [
        {**trained, **resumed}
        for trained, resumed in zip(run(arguments, "train"), run(arguments, "resume"), strict=True)
    ]
    peaks = {part: max(found[part] for found in ranks) for part in PARTS}
    share = sizes["model"] / arguments.ranks
    figures = {f"peak of a rank, {part}": figure(round(peaks[part] / 1e6), "MB") for part in PARTS}
    named = {
        "the whole model": sizes["model"],
        "a rank's share of it": share,
        "a layer": sizes["layer"],
        "an embedding": sizes["embedding"],
    }
    figures |= {name: figure(round(size / 1e6), "MB", None) for name, size in named.items()}
    for name, value in figures.items():
        print(f"{name}: {value['value']} {value['unit']}")
    arguments.rank = None
    save(
        arguments,
        f"Peak memory of {arguments.ranks} ZeRO-3 ranks on CPUs, {sizes['model'] / 2e9:.2f}e9 parameters in"
        " bf16",
        figures,
    )


def make_model(arguments: argparse.Namespace) -> dict[str, float]:
    """Writes the model, if it is not there; returns bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    hidden = arguments.hidden
    inner = arguments.hidden * 11 // 4
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=arguments.vocabulary,
        tie_word_embeddings=False,
    )
    folder = arguments.out / "model"
    if not folder.exists():
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        torch.manual_seed(0)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="b"
        )
        tokenizer.save_pretrained(folder)
    layer = 2 * (4 * hidden * hidden + 3 * hidden * inner)
    embedding = 2 * arguments.vocabulary * hidden
    return {"model": arguments.layers * layer + 2 * embedding, "layer": layer, "embedding": embedding}


def run(arguments: argparse.Namespace, what: str) -> list[dict[str, int]]:
    """Runs all ranks; what each has written."""
    from rlhf_core.cluster.rank_environment import STORE, store_address

    store = store_address()
    children = []
    for number in range(arguments.ranks):
        environment = os.environ | {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(arguments.ranks),
            STORE: store,
        }
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--rank", f"{number}/{what}"]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    if any([child.wait() for child in children]):
        raise SystemExit("a rank failed: see above")
    return [
        json.loads((arguments.out / f"{what}-{number}.json").read_text()) for number in range(arguments.ranks)
    ]


def rank(arguments: argparse.Namespace) -> None:
    """One rank: writes the peak bytes of each part."""
    from rlhf_core.config import SFT, Data, Ranks
    from rlhf_core.models.load_model import trained_policy
    from rlhf_core.training import ranks
    from rlhf_core.training.zero import zero_engine

    zero_engine.library()
    zero_engine.KEPT = 0.0
    number, what = arguments.rank.split("/")
    peaks: dict[str, int] = {}
    ended(peaks, "libraries")
    config = SFT(
        model="base",
        data=Data(sources="none"),
        dtype="bfloat16",
        zero_stage=3,
        ranks=Ranks(num_ranks_per_node=arguments.ranks),
        max_len=TOKENS,
    )
    source = str(arguments.out / "model")
    state = arguments.out / "state"
    shards: dict[str, Any] = {} if arguments.whole else {"shards": ranks.shards_of(config)}
    policy = trained_policy(source, config.dtype, False, None, 0, **shards)
    ended(peaks, "load")
    engine = ranks.make_engine(policy, config)
    ended(peaks, "engine")
    if what == "resume":
        engine.load_state(state)
        step(engine, 1)
        ended(peaks, "resume")
    else:
        for index in range(2):
            step(engine, index)
        ended(peaks, "step")
        state.mkdir(exist_ok=True)
        engine.barrier()
        engine.save_state(state)
        engine.finish_saving()  # as a stage does before it exports
        ended(peaks, "save")
        start = time.monotonic()
        ranks.export(engine, arguments.out / "checkpoint", source, None, False)
        engine.barrier()
        peaks["export seconds"] = round(time.monotonic() - start)
        ended(peaks, "export")
    (arguments.out / f"{what}-{number}.json").write_text(json.dumps(peaks))


def step(engine: Any, index: int) -> None:
    """One optimiser step on other random tokens for each rank."""
    import torch

    tokens = torch.randint(
        1000, (1, TOKENS), generator=torch.Generator().manual_seed(100 * index + engine.rank)
    )
    out = engine(tokens, torch.arange(TOKENS)[None], torch.zeros_like(tokens))
    engine.backward(-out.logprobs.mean() / engine.world_size, True)
    print(f"rank {engine.rank}, step {index}: gradient norm {engine.step(1e-5):.6g}", file=sys.stderr)


def ended(peaks: dict[str, int], part: str) -> None:
    """Notes the peak of a part, and lets that of the next begin."""
    status = Path("/proc/self/status").read_text()
    peaks[part] = int(status.split("VmHWM:")[1].split()[0]) * 1024
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
