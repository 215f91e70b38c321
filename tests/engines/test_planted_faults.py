"""A bad SFT, a reward model on shuffled labels, a PPO with a huge learning rate: the chain stops behind the
right one, and the page says which it was. Real training and real rollouts on the demo's base model, with the
demo's own gates for reward model and PPO.

That a sound PPO passes them is shown by the demo itself, which would not come to its end otherwise.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from flows.alignment import alignment
from rlhf_core.recipe.gate_checks import GateFailed
from rlhf_core.recipe.load_recipe import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
QUESTIONS = dict(sft=r"Is my SFT bad\?", reward_model=r"Is my reward model bad\?", ppo=r"Is my PPO bad\?")
TEXT = """
name: planted
base_model: material/base
stages:
  sft:
    data: {sources: material/sft.jsonl, max_samples: 480}
    eval_data: {sources: held_out_chats.jsonl}
    max_len: 64
    train_batch_size: 16
    micro_train_batch_size: 16
    max_epochs: 1
    learning_rate: 3.0e-3
    gates: [{metric: eval/loss, max: 2.0}]  # so little training ends near 1.3
  reward_model:
    data: {sources: pairs.jsonl}
    eval_data: {sources: held_out_pairs.jsonl}
    max_len: 48
    max_epochs: 2
    train_batch_size: 32
    micro_train_batch_size: 32
    learning_rate: 1.0e-3
  ppo:
    advantage_estimator: rloo
    reward: {function: "reward.py:brief"}
    prompts: {sources: material/prompts.jsonl}
    prompt_max_len: 48
    generate_max_len: 8
    rollout_batch_size: 16
    n_samples_per_prompt: 4
    train_batch_size: 64
    micro_rollout_batch_size: 64
    micro_train_batch_size: 64
    max_steps: 3
    actor_ranks: {cpus: 0.4}
    reference_ranks: {cpus: 0.4}
    reward_ranks: {cpus: 0.2}
    engine: {cpus: 0.4, kv_cache_gib: 0.1}
  publication: {model: ppo}
"""


@pytest.fixture(scope="module", autouse=True)
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    storage = tmp_path_factory.mktemp("prefect-results")
    with (
        temporary_settings({PREFECT_LOCAL_STORAGE_PATH: storage}),
        prefect_test_harness(server_startup_timeout=300),
    ):
        yield


@pytest.fixture(scope="module")
def folder(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all faults: what is sound in two of them is done once."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "material").symlink_to(material)
    (folder / "recipe.yaml").write_text(TEXT)
    (folder / "reward.py").write_text(
        "def brief(responses):\n    return [-len(response) / 10 for response in responses]\n"
    )
    (folder / "held_out_chats.jsonl").write_text(
        "\n".join((material / "sft.jsonl").read_text().splitlines()[-64:])
    )
    pairs = [json.loads(line) for line in (material / "preferences.jsonl").read_text().splitlines()]
    coin = random.Random(0)
    shuffled = [
        pair if coin.random() < 0.5 else {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}
        for pair in pairs[:300]
    ]
    for name, rows in {"pairs": pairs[:300], "shuffled": shuffled, "held_out_pairs": pairs[300:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("fault", "bad", "expected"),
    [
        pytest.param(
            "ppo.actor_learning_rate=0.03",
            "ppo",
            "PPO moved far from its reference: lower actor_learning_rate or raise init_kl_coef, and distrust its reward.",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "reward_model.data.sources=shuffled.jsonl",
            "reward_model",
            "The reward model is bad, or overconfident: it does not generalise to unseen pairs.",
            marks=pytest.mark.long,
        ),
        ("sft.learning_rate=0.3", "sft", "The SFT is bad, and all later stages start from this model."),
    ],
)
def test_the_chain_stops_behind_the_bad_stage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, bad: str, expected: str
) -> None:
    monkeypatch.chdir(folder)
    demo = load_recipe(ROOT / "deployments/recipes/tiny-cpu.yaml").stages
    gates = [
        f"{name}.gates={json.dumps([gate.model_dump() for gate in demo[name].gates])}"
        for name in ("reward_model", "ppo")
    ]
    with pytest.raises(GateFailed, match=f"stage {bad}: ") as failed:
        alignment(load_recipe("recipe.yaml", [*gates, fault]))
    assert {verdict.stage for verdict in failed.value.verdicts} == {bad} and expected in str(failed.value)

    summary = {
        stage["name"]: stage
        for stage in json.loads(Path("artifacts/planted/summary.json").read_text())["stages"]
    }
    order = ["sft", "reward_model", "ppo", "publication"]
    after = order[order.index(bad) + 1 :]
    assert [summary[name]["status"] for name in after] == ["not run"] * len(after)
    for name in order[: order.index(bad)]:
        assert all(gate["passed"] for gate in summary[name]["gates"]), f"{name} is sound, and passes"

    page = " ".join(re.sub(r"<[^>]*>", " ", Path("artifacts/planted/report.html").read_text()).split())
    assert f"The run stopped after {bad}, which did not pass a gate" in page
    answers = {name: re.search(rf"{question} {name} (\w+)", page) for name, question in QUESTIONS.items()}
    found = {name: answer[1] for name, answer in answers.items() if answer}
    assert found == {
        name: "Yes" if name == bad else "Unknown" if name in after else "No" for name in QUESTIONS
    }
