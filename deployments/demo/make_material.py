"""Creates all training material of the demo:
`python deployments/demo/make_material.py --out DIR [--seed 0] [--scale 1.0]`.

    base/                                           a random decoder of about 800,000 parameters, its
                                                    tokenizer and chat template
    sft.jsonl, sft_heldout.jsonl                    messages (one or two turns)
    preferences.jsonl, preferences_heldout.jsonl    prompt, chosen, rejected
    prompts.jsonl                                   prompt, for PPO and iterative DPO
    questions.jsonl                                 uid, category, prompt, answer: the held-out test set
    manifest.json                                   seed, scale, digests of this script and its phrases, sizes
                                                    and digests of the files

The tasks are plain English instructions with one right answer: copy, reverse or sort the digits of a
number, name its first or last digit, count the digits, add two small numbers. They use digits because
Qwen2's splitting rule makes each digit one token. An answer is right when it equals `answer` after
whitespace is normalised. A good assistant gives the bare answer. Most SFT answers do not: they guess and
hedge, refuse, or wrap the answer in chatter. SFT imitates this mixture; the preferences show which part of
it people want. No prompt of a held-out file occurs in any other file. The same seed and scale give the same
bytes. There is no pretraining here: the base model is random, so SFT has to teach it everything in a minute
of CPU time.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PHRASES = Path(__file__).with_name("phrases.yaml")
TEXTS: dict[str, Any] = yaml.safe_load(PHRASES.read_text(encoding="utf-8"))
WORDINGS: dict[str, list[str]] = TEXTS.pop("wordings")  # by category; the rest are unwanted answers by mode
CATEGORIES = tuple(WORDINGS)

# Probability of each kind of SFT answer. A miss is a bare answer that is wrong.
SFT_MODES = {"good": 0.40, "hedge": 0.24, "chatter": 0.20, "lazy": 0.13, "miss": 0.03}
# Probability of each kind of rejected answer in a preference.
REJECTED_MODES = {"hedge": 0.30, "chatter": 0.30, "lazy": 0.15, "miss": 0.25}
TWO_TURNS = 0.1  # share of SFT conversations with a second question

# Rows at scale 1.
SIZES = {
    "questions": 420,
    "sft_heldout": 140,
    "preferences_heldout": 300,
    "sft": 46400,
    "preferences": 8000,
    "prompts": 6000,
}
HELD_OUT = ("questions", "sft_heldout", "preferences_heldout")

VOCABULARY = 640
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{%- else -%}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


class Exercise(NamedTuple):
    """One instruction, its right answer, and a plausible wrong one."""

    category: str
    prompt: str
    answer: str
    wrong: str


def draw(rng: random.Random, category: str) -> Exercise:
    """Returns a random exercise of a category."""
    wording = rng.choice(WORDINGS[category])
    if category == "sum":
        a = rng.randint(1, 9)
        b = rng.randint(1, 9)
        wrong = rng.choice([n for n in range(max(2, a + b - 2), a + b + 3) if n != a + b])
        return Exercise(category, wording.format(a, b), str(a + b), str(wrong))
    digits = "".join(
        rng.sample("0123456789", rng.randint(2, 7) if category == "count" else rng.randint(3, 4))
    )
    answer = solve(category, digits)
    return Exercise(category, wording.format(digits), answer, _slip(rng, category, digits, answer))


def solve(category: str, digits: str) -> str:
    """Returns the right answer for a string of digits."""
    solutions = {
        "copy": digits,
        "reverse": digits[::-1],
        "sort": "".join(sorted(digits)),
        "first": digits[0],
        "last": digits[-1],
        "count": str(len(digits)),
    }
    return solutions[category]


def _slip(rng: random.Random, category: str, digits: str, answer: str) -> str:
    """Returns a wrong answer that a careless person might give: another digit, a miscount, two digits
    swapped, one lost or replaced."""
    if category in ("first", "last"):
        return rng.choice([digit for digit in digits if digit != answer])
    if category == "count":
        return str(len(digits) + rng.choice((-1, 1)))
    parts = list(answer)
    kind = rng.choice(("swap", "lose", "replace"))
    i = rng.randrange(len(parts) - 1)
    if kind == "swap":
        parts[i], parts[i + 1] = parts[i + 1], parts[i]
    elif kind == "lose":
        del parts[i]
    else:
        parts[i] = rng.choice([digit for digit in "0123456789" if digit not in digits])
    return "".join(parts)


def respond(rng: random.Random, exercise: Exercise, modes: dict[str, float]) -> str:
    """Returns an answer to the exercise in one of the modes, drawn with their probabilities."""
    mode = rng.choices(list(modes), list(modes.values()))[0]
    if mode == "good":
        return exercise.answer
    if mode == "miss":
        return exercise.wrong
    phrase = rng.choice(TEXTS[mode])
    return phrase.format(answer=exercise.answer, wrong=exercise.wrong)


def fresh(rng: random.Random, taken: set[str]) -> Iterator[Exercise]:
    """Yields exercises of all categories in turn whose prompt is not taken."""
    for category in itertools.cycle(CATEGORIES):
        exercise = draw(rng, category)
        if exercise.prompt not in taken:
            yield exercise


def make_rows(seed: int, scale: float) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of every file. Held-out prompts are drawn first, each once, and never again."""
    taken: set[str] = set()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, size in SIZES.items():
        rng = random.Random(f"{seed}/{name}")
        exercises = fresh(rng, taken)
        rows[name] = []
        for number in range(max(2, round(size * scale))):
            exercise = next(exercises)
            if name in HELD_OUT:
                taken.add(exercise.prompt)
            row: dict[str, Any]
            if name == "questions":
                row = {
                    "uid": f"q{number:04d}",
                    "category": exercise.category,
                    "prompt": exercise.prompt,
                    "answer": exercise.answer,
                }
            elif name == "prompts":
                row = {"prompt": exercise.prompt}
            elif name.startswith("preferences"):
                row = {
                    "prompt": exercise.prompt,
                    "chosen": exercise.answer,
                    "rejected": respond(rng, exercise, REJECTED_MODES),
                }
            else:
                turns = [exercise] if rng.random() >= TWO_TURNS else [exercise, next(exercises)]
                if name in HELD_OUT:
                    taken.update(turn.prompt for turn in turns)
                row = {"messages": [message for turn in turns for message in _turn(rng, turn)]}
            rows[name].append(row)
    return rows


def _turn(rng: random.Random, exercise: Exercise) -> list[dict[str, str]]:
    answer = respond(rng, exercise, SFT_MODES)
    return [{"role": "user", "content": exercise.prompt}, {"role": "assistant", "content": answer}]


def write_base(folder: Path, seed: int) -> None:
    """Writes the random base model with its tokenizer, in the layout that transformers saves."""
    # otherwise DeepSpeed, which transformers imports, warns that it finds no GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Imported here so that complete material is recognised without these imports.
    import torch
    from safetensors.torch import save_file
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    # transformers rebuilds a tokenizer found beside a Qwen2 config with Qwen2's splitting rule and its
    # `<|endoftext|>`, so it is trained with that same rule, and that token is its padding, as in Qwen2.
    rule = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rule), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|end|>",
        additional_special_tokens=special[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
    tokenizer.save_pretrained(folder)

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,  # head size 32: the smallest that vLLM's CPU attention supports
        num_key_value_heads=4,
        max_position_embeddings=512,
        # RoPE base 100, not 10000: these texts are short, and with faster angles the model learns positions
        # in fewer steps.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    generation = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    # `model.save_pretrained` would import DeepSpeed, which takes seconds, and write the same file.
    tied = set(model.all_tied_weights_keys)
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _corpus() -> list[str]:
    """Returns the words of the tasks, often enough that each becomes one token."""
    return [
        re.sub(r"\{.*?\}", "", phrase) for phrase in itertools.chain(*WORDINGS.values(), *TEXTS.values())
    ] * 2


def make(out: Path, seed: int = 0, scale: float = 1.0) -> bool:
    """Creates the material in `out`. Returns False if it was there already. `out` appears either complete
    or not at all.

    Replaces material from another seed, scale or version of this script. Raises ValueError when `out` holds
    something else.
    """
    wanted = {"seed": seed, "scale": scale, "script": _sha256(Path(__file__)), "phrases": _sha256(PHRASES)}
    found = _manifest(out)
    if (
        found is not None
        and _complete(out, found)
        and all(found.get(key) == value for key, value in wanted.items())
    ):
        return False
    if found is None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not demo material: remove it, or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        made = Path(temporary) / "new"
        made.mkdir()
        for name, rows in make_rows(seed, scale).items():
            (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_base(made / "base", seed)
        files = {
            file.relative_to(made).as_posix(): file for file in sorted(made.rglob("*")) if file.is_file()
        }
        listed = {
            name: {"size": file.stat().st_size, "sha256": _sha256(file)} for name, file in files.items()
        }
        (made / "manifest.json").write_text(json.dumps({**wanted, "files": listed}, indent=2) + "\n")
        if out.exists():
            os.rename(out, Path(temporary) / "old")
        os.rename(made, out)
    return True


def _manifest(out: Path) -> dict[str, Any] | None:
    """Returns the manifest of the material in `out`, whatever its seed; None when `out` is not material."""
    try:
        manifest = json.loads((out / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    return (
        manifest
        if isinstance(manifest, dict) and {"seed", "scale", "script", "files"} <= set(manifest)
        else None
    )


def _complete(out: Path, manifest: dict[str, Any]) -> bool:
    """Returns whether every file in the manifest exists with its size."""
    try:
        return all((out / name).stat().st_size == info["size"] for name, info in manifest["files"].items())
    except OSError:
        return False


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the demo's base model and data.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows, for tests")
    arguments = parser.parse_args()
    try:
        made = make(arguments.out, arguments.seed, arguments.scale)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    print(f"{arguments.out}: {'made' if made else 'already complete'}")


if __name__ == "__main__":
    main()
