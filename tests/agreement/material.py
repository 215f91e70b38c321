"""What both sides train on: a tiny Llama, a word-level tokenizer with a chat template, a few rows of each
kind, and the settings.

Weights are integers over a power of two and rows come from `random.Random`, so every machine makes the same
material, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_core.config import AdvantageEstimator, Aggregation
from rlhf_core.training.train_loop import items_of_step

SEED = 7
ROWS = 40
BATCH = 8
EPOCHS = 4
STEPS = ROWS // BATCH * EPOCHS
PROMPTS = 3
ANSWERS = 4  # of the rollout
SPECIAL = ["<unk>", "<pad>", "<eos>", "<user>", "<assistant>"]
WORDS = [f"w{i}" for i in range(27)]
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} {% else %}<assistant> "
    "{% generation %}{{ m['content'] }}<eos>{% endgeneration %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Of every case, on both sides. Constant learning rate: the two schedules differ in their first and last step.
OPTIMISER: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_norm": 1.0}


class Case(NamedTuple):
    """One training to compare: our stage and fields, the file of rows, and TRL's trainer with its own
    fields."""

    stage: str
    rows: str
    learning_rate: float
    ours: dict[str, Any]
    trainer: str
    trl: dict[str, Any]


CASES: dict[str, Case] = {
    "sft, padded": Case("sft", "chats", 3e-3, {"packing": False}, "SFT", {"assistant_only_loss": True}),
    "sft, packed": Case(
        "sft",
        "chats",
        3e-3,
        {"packing": True},
        "SFT",
        {"assistant_only_loss": True, "padding_free": True, "max_length": None},
    ),
    "reward model": Case("reward_model", "pairs", 1e-3, {}, "Reward", {}),
    "reward model, margin and centring": Case(
        "reward_model", "margins", 1e-3, {"centering": 0.01}, "Reward", {"center_rewards_coefficient": 0.01}
    ),
    "dpo, sigmoid": Case("dpo", "pairs", 1e-3, {"beta": 0.1}, "DPO", {"beta": 0.1, "loss_type": ["sigmoid"]}),
    "dpo, sigmoid with nll": Case(
        "dpo",
        "pairs",
        1e-3,
        {"beta": 0.1, "nll_coef": 0.2},
        "DPO",
        {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]},
    ),
    # TRL's `sigmoid` has no label smoothing; its `aot` on batches of one pair sorts nothing and is cDPO.
    "dpo, cDPO": Case(
        "dpo",
        "pairs",
        1e-3,
        {"beta": 0.1, "label_smoothing": 0.1},
        "DPO",
        {
            "beta": 0.1,
            "loss_type": ["aot"],
            "label_smoothing": 0.1,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": BATCH,
        },
    ),
    "dpo, ipo": Case(
        "dpo", "pairs", 1e-3, {"beta": 0.1, "loss": "ipo"}, "DPO", {"beta": 0.1, "loss_type": ["ipo"]}
    ),
    # TRL's margin is beta x (simpo_gamma / beta) = our gamma.
    "simpo": Case(
        "dpo",
        "pairs",
        1e-3,
        {"beta": 2.0, "gamma": 1.0, "loss": "simpo"},
        "CPO",
        {"beta": 2.0, "simpo_gamma": 1.0, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "kto": Case(
        "kto",
        "labels",
        2e-3,
        {"beta": 0.1, "w_desirable": 1.5, "w_undesirable": 1.0},
        "KTO",
        {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 1.0},
    ),
}


class RLCase(NamedTuple):
    """One loss to compare on recorded tensors: our estimator and objective, and TRL's trainer with its own
    fields."""

    estimator: AdvantageEstimator
    aggregation: Aggregation
    ours: dict[str, Any]
    trainer: str
    trl: dict[str, Any]
    beta: float = 0.0  # of the KL: in the loss for GRPO, in the reward for RLOO
    cap: float | None = None  # of the importance weights against the sampler; None: off
    on_policy: bool = False  # old log-probs are the policy's own; only the gradients are compared
    one_token: bool = False  # answers cut after their first token


CLIP_LOW = 0.2
CLIP_HIGH = 0.28
MAX_LENGTH = 16
RL: dict[str, RLCase] = {
    "grpo": RLCase("grpo", "sequence", {}, "GRPO", {"loss_type": "grpo"}),
    "grpo, kl": RLCase("grpo", "sequence", {}, "GRPO", {"loss_type": "grpo"}, beta=0.04),
    "grpo, importance weights": RLCase("grpo", "sequence", {}, "GRPO", {"loss_type": "grpo"}, cap=1.5),
    "grpo, token mean": RLCase("grpo", "token", {}, "GRPO", {"loss_type": "bnpo"}),
    "grpo, token mean, kl": RLCase("grpo", "token", {}, "GRPO", {"loss_type": "bnpo"}, beta=0.04),
    "grpo, token mean, importance weights": RLCase(
        "grpo", "token", {}, "GRPO", {"loss_type": "bnpo"}, cap=1.5
    ),
    "grpo, dual clip": RLCase(
        "grpo", "sequence", {"dual_clip": 1.5}, "GRPO", {"loss_type": "grpo", "delta": 1.5}
    ),
    "gspo": RLCase(
        "grpo",
        "sequence",
        {"ratio": "sequence"},
        "GRPO",
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "dr_grpo": RLCase("dr_grpo", "constant", {}, "GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dr_grpo, kl": RLCase(
        "dr_grpo", "constant", {}, "GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}, beta=0.04
    ),
    "dr_grpo, importance weights": RLCase(
        "dr_grpo", "constant", {}, "GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}, cap=1.5
    ),
    # TRL's RLOO has one ratio for a whole answer, the product of its tokens'; ours has one a token. The two
    # are the same function for answers of one token, and have the same gradient on the policy that sampled,
    # whose loss TRL does not sum over tokens.
    "rloo, answers of one token": RLCase("rloo", "token", {}, "RLOO", {}, one_token=True),
    "rloo, kl, on policy (gradient)": RLCase(
        "rloo", "constant", {"generate_max_len": 1}, "RLOO", {}, beta=0.05, on_policy=True
    ),
}


def make(folder: Path) -> None:
    """Writes `base/` and the rows."""
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = [*SPECIAL, *WORDS]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=None,
    )
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.chat_template = CHAT
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randint(-128, 128, parameter.shape, generator=generator) / 512
            parameter.copy_(values if parameter.ndim > 1 else 1 + values)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")

    source = random.Random(SEED)

    def text() -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.randint(2, 9)))

    def user() -> dict[str, str]:
        return {"role": "user", "content": text()}

    def answer() -> dict[str, str]:
        return {"role": "assistant", "content": text()}

    rows: dict[str, list[dict[str, Any]]] = {
        "chats": [
            {"messages": [m for _ in range(source.randint(1, 3)) for m in (user(), answer())]}
            for _ in range(ROWS)
        ],
        "pairs": [{"prompt": [user()], "chosen": [answer()], "rejected": [answer()]} for _ in range(ROWS)],
        "labels": [
            {"prompt": [user()], "response": text(), "label": source.random() < 0.75} for _ in range(ROWS)
        ],
    }
    rows["margins"] = [{**row, "margin": source.randint(0, 16) / 8} for row in rows["pairs"]]
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Rollout(NamedTuple):
    """`ANSWERS` answers to each of `PROMPTS` prompts in a row: prompts (messages), answer tokens, and
    rewards."""

    prompts: list[list[dict[str, str]]]
    answers: list[list[int]]
    rewards: list[float]


def rollout() -> Rollout:
    source = random.Random(SEED + 1)
    prompts = [
        [{"role": "user", "content": " ".join(source.choices(WORDS, k=3 + i))}] for i in range(PROMPTS)
    ]
    answers = [
        [*(source.randrange(5, 32) for _ in range(source.randint(1, 9))), 2] for _ in range(PROMPTS * ANSWERS)
    ]
    rewards = [source.randint(-16, 16) / 8 for _ in answers]
    return Rollout([prompt for prompt in prompts for _ in range(ANSWERS)], answers, rewards)


class Odds(NamedTuple):
    """Mean log-probs of answers for ORPO's odds ratio, whose NLL is another one in TRL (a mean over prompt
    and answer tokens)."""

    chosen: list[float]
    rejected: list[float]
    lambd: float


def odds() -> Odds:
    source = random.Random(SEED + 3)
    chosen, rejected = ([-source.randint(1, 64) / 16 for _ in range(BATCH)] for _ in range(2))
    return Odds(chosen, rejected, lambd=0.2)


def digest(folder: Path) -> str:
    """Of the model's weights, of the rows and of the order in which our stages take them: 16 hex digits."""
    content = hashlib.sha256()
    for key, weight in sorted(load_file(folder / "base" / "model.safetensors").items()):
        content.update(key.encode() + weight.numpy().tobytes())
    for file in sorted(folder.glob("*.jsonl")):
        content.update(file.read_bytes())
    order = [items_of_step(range(ROWS), step, ROWS // BATCH, BATCH, SEED) for step in range(STEPS)]
    content.update(json.dumps(order).encode())
    return content.hexdigest()[:16]
