"""Memory of scoring one long sequence with a large vocabulary: the peak beside the model's own size and one
chunk of logits.

    python tests/benchmarks/long_sequence.py --model FOLDER --tokens 32768

FOLDER holds a transformers checkpoint (random weights do). Prints GiB, seconds and the limit that must hold:
twice the model and one chunk.
"""

from __future__ import annotations

import argparse
import time

import torch
from record import add_options, figure, save

from rlhf_core.data.documents import Document
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.logprobs.token_logprobs import LOGITS_CHUNK
from rlhf_core.objectives.collate import collate

GIB = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=32_768)
    add_options(parser, "long-sequence")
    arguments = parser.parse_args()

    policy = load_policy(arguments.model, "bfloat16").cuda()
    vocabulary = policy.model.config.vocab_size
    model = sum(p.numel() * p.element_size() for p in policy.parameters())
    chunk = LOGITS_CHUNK * vocabulary * 4
    limit = 2 * model + chunk
    generator = torch.Generator().manual_seed(0)
    document = Document(
        torch.randint(2, vocabulary, (arguments.tokens,), generator=generator).tolist(),
        [True] * arguments.tokens,
    )
    batch = collate([[document]], 0).to("cuda")
    print(
        f"model {model / GIB:.2f} GiB, all logits would be {arguments.tokens * vocabulary * 4 / GIB:.1f},"
        f" limit {limit / GIB:.2f}"
    )
    held = True
    for entropy in ("no", "value"):
        for attempt in ("first", "second"):
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.monotonic()
            with torch.no_grad():
                policy(batch.tokens, batch.positions, batch.documents, 1.0, entropy)
            torch.cuda.synchronize()
            seconds = time.monotonic() - start
            peak = torch.cuda.max_memory_allocated()
            held = held and peak < limit
            print(f"scoring, entropy {entropy}, {attempt}: {seconds:.2f} s, peak {peak / GIB:.2f} GiB")
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    torch.cuda.reset_peak_memory_stats()
    policy(batch.tokens, batch.positions, batch.documents).logprobs.sum().backward()
    print(
        "forward and backward with gradient checkpointing: peak"
        f" {torch.cuda.max_memory_allocated() / GIB:.2f} GiB"
    )
    training = torch.cuda.max_memory_allocated() / GIB
    figures = {"scoring": figure(round(seconds, 3), "s"), "peak": figure(round(peak / GIB, 2), "GiB")}
    save(
        arguments,
        f"Scoring {arguments.tokens:,} tokens",
        figures | {"peak of training": figure(round(training, 2), "GiB")},
    )
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
