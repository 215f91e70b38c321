"""The answers of a round, with real engines: several give those of one, and a round that was cut off asks for
what it lacks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_core.config import EngineConfig, Preferences
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.data.sources import prompts
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.runs.run_dir import STATE, RunDir
from rlhf_core.stages.preferences.sample_answers import answers_of_round
from rlhf_core.stages.preferences.score_answers import scores_on_ranks
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("rows", [2, None])
def test_a_reward_model_on_two_processes_gives_the_scores_of_one(
    rows: int | None, material: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(material / "base"))
    model = AutoModelForSequenceClassification.from_pretrained(
        material / "base", num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rng = random.Random(0)
    # with rows: more than two looks
    texts = [[rng.randrange(5, 200) for _ in range(rng.randrange(3, 40))] for _ in range(75)]
    documents = [Document(text, [False] + [True] * (len(text) - 1)) for text in texts]
    config = Preferences(
        policy="base", reward="rm", prompts={"sources": "x"}, micro_rollout_batch_size=rows, engine=EngineConfig(num_engines=2, cpus=0.5)
    )  # fmt: skip
    found = scores_on_ranks(config, str(tmp_path), documents)
    assert found == pytest.approx(RewardScorer(str(tmp_path), "float32", 2).score(documents), abs=1e-5)
    assert len(set(found)) > 70
    assert not ray.is_initialized()


def test_two_engines_give_the_answers_of_one_and_stored_answers_are_not_sampled_again(
    material: Path, tmp_path: Path
) -> None:
    base = str(material / "base")
    found = []
    renderer = Renderer(load_tokenizer(base), "chat")
    for engines in (1, 2):
        config = Preferences(
            policy="base", reward="rm", prompts={"sources": str(material / "prompts.jsonl"), "max_samples": 5}, n_samples_per_prompt=2,
            prompt_max_len=64, generate_max_len=12, engine=EngineConfig(num_engines=engines, cpus=0.5, kv_cache_gib=0.5),
        )  # fmt: skip
        asked = [prompt.tokens for prompt in prompts(config.prompts, renderer, 64, 0).items]
        request = stage_request(config, base, name="x", seed=3)
        run = RunDir(tmp_path / str(engines))
        (run / STATE).mkdir(parents=True)
        found.append(answers_of_round(config, base, asked, renderer.stop_token_ids, request, run))
    assert found[0] == found[1] and not ray.is_initialized()
    assert len({tuple(answer.tokens) for group in found[0] for answer in group}) > 5

    file = tmp_path / "1" / STATE / "answers.jsonl"
    kept = {
        prompt: line
        for line in file.read_text().splitlines(keepends=True)
        for prompt in [json.loads(line)[0]]
    }
    # differs from what an engine would say again
    changed = kept[3].replace("true", "false").replace("[[[", "[[[7, ")
    file.write_text(kept[0] + changed + kept[4][:-9])
    config = config.model_copy(update={"engine": EngineConfig(kv_cache_gib=0.5)})
    again = answers_of_round(config, base, asked, renderer.stop_token_ids, request, RunDir(tmp_path / "1"))
    assert [again[i] for i in (0, 1, 2, 4)] == [found[0][i] for i in (0, 1, 2, 4)]
    assert list(again[3][0].tokens) == [7, *found[0][3][0].tokens] and not again[3][0].finished
    assert sorted(json.loads(line)[0] for line in file.read_text().splitlines()) == [0, 1, 2, 3, 4]
