"""Reference and reward models that are cut over their ranks score as one rank with the whole model does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from tests.support.families import make_family
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.tiny_models import reward_model

pytestmark = pytest.mark.slow
# seven, which two ranks cannot halve
TOKENS = [[(7 * i + 3 * j) % 80 for j in range(9 + 5 * i)] for i in range(7)]
PROGRAM = """
import json, logging, sys
logging.disable(logging.WARNING)
from rlhf_core.data.documents import Document
from rlhf_core.models.weights import shards
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward

shards.SMALL = 500
documents = [Document(tokens, [True] * len(tokens)) for tokens in json.loads(sys.argv[1])]
found = []
for role, make, method in ((sys.argv[2], ReferenceModel, "logprobs"), (sys.argv[3], Reward, "scores")):
    options = {"temperature": 0.7} if make is ReferenceModel else {}
    scorer = make(ModelSpec(role, "float32", 0, 2, False), shard=True, **options)
    weights = list(scorer.module.parameters())
    held = [sum(w.numel() + w.ds_tensor.numel() for w in weights) / sum(w.ds_numel for w in weights)]
    for _ in range(2):
        scored = getattr(scorer, method)(documents)
    held.append(sum(w.numel() + w.ds_tensor.numel() for w in weights if not w.ds_persist) / sum(w.ds_numel for w in weights))
    found.append([held, [(index, values.tolist()) for index, values in scored]])
    if make is ReferenceModel:
        said = [(index, top.ids.tolist(), top.logprobs.tolist()) for index, top in scorer.top_tokens(documents, 5)]
print(json.dumps([*found, said]))
"""
BATCHES = [[], TOKENS, TOKENS[:1], TOKENS[2:7]]  # fewer documents than ranks, and none
TOGETHER = """
import json, logging, os, sys
logging.disable(logging.WARNING)
from rlhf_core.data.documents import Document
from rlhf_core.models.weights import shards
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.training.zero import zero_shards

shards.SMALL, prepared = 500, zero_shards.prepared
zero_shards.prepared = lambda *model, **how: prepared(*model, **how) | {"stage3_param_persistence_threshold": 0}
count, found = int(os.environ["WORLD_SIZE"]), []
for micro_tokens in (None, 40):
    for path, make, method in ((sys.argv[2], ReferenceModel, "logprobs"), (sys.argv[3], Reward, "scores")):
        options = {"temperature": 0.7} if make is ReferenceModel else {}
        scorer = make(ModelSpec(path, "float32", 0, 2, False, micro_tokens, min(2, count)), shard=count > 1, **options)
        assert count == 1 or (scorer._sequence.size == 2 and not any(weight.ds_persist for weight in scorer.module.parameters()))
        for batch in json.loads(sys.argv[1]):
            documents = [Document(tokens, [place >= 3 for place in range(len(tokens))]) for tokens in batch]
            found.append([(index, values.tolist()) for index, values in getattr(scorer, method)(documents)])
print(json.dumps(found))
"""


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_two_ranks_score_as_one_does(
    family: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_family(family, material / "base", tmp_path / "policy")
    reward = reward_model(material / "base", tmp_path / "reward")
    printed = [
        json.loads(text.splitlines()[-1])
        for text in on_gloo_ranks(2, PROGRAM, json.dumps(TOKENS), policy, reward)
    ]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    documents = [Document(tokens, [True] * len(tokens)) for tokens in TOKENS]
    reference = ReferenceModel(ModelSpec(str(policy), "float32", 0, 2, False), 0.7)
    whole = [
        reference.logprobs(documents),
        Reward(ModelSpec(str(reward), "float32", 0, 2, False)).scores(documents),
    ]
    for role, expected in enumerate(whole):
        scored = {index: values for rank in printed for index, values in rank[role][1]}
        # a rank holds about half
        assert scored.keys() == set(range(7)) and all(max(rank[role][0]) < 0.65 for rank in printed)
        for index, values in expected:
            np.testing.assert_allclose(scored[index], values, rtol=1e-4, atol=1e-5)
    said = {index: (ids, logprobs) for rank in printed for index, ids, logprobs in rank[2]}
    assert said.keys() == set(range(7))
    for index, top in reference.top_tokens(documents, 5):
        assert said[index][0] == top.ids.tolist()
        np.testing.assert_allclose(said[index][1], top.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_pairs_of_ranks_that_compute_each_pass_together_score_as_one_rank_does(
    material: Path, tmp_path: Path
) -> None:
    """Of padded rows and packed ones; the models are cut over all ranks."""
    policy = make_family("llama", material / "base", tmp_path / "policy")
    reward = reward_model(material / "base", tmp_path / "reward")

    def scored(count: int) -> list[list[dict[int, list[float]]]]:
        printed = on_gloo_ranks(count, TOGETHER, json.dumps(BATCHES), policy, reward)
        return [[dict(batch) for batch in json.loads(text.splitlines()[-1])] for text in printed]

    (whole,) = scored(1)
    for count in (2, 4):
        for expected, *shares in zip(whole, *scored(count), strict=True):
            assert sum(map(len, shares)) == len(expected), "each document once"
            for index, values in expected.items():
                np.testing.assert_allclose(
                    [v for share in shares for v in share.get(index, [])], values, rtol=1e-4, atol=1e-5
                )
