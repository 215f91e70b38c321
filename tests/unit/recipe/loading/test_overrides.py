"""Overrides of a recipe: what they do, and that each wrong one is one sentence."""

from __future__ import annotations

import pytest

from rlhf_core.config import PPO, SFT, Evaluation, RewardJudge
from rlhf_core.recipe.load_recipe import load_recipe
from tests.support.text_rows import rows_of_text
from tests.support.tiny_recipe import Write


def test_an_override_is_read_as_yaml_1_2_too(recipe: Write) -> None:
    with pytest.raises(ValueError, match=r"^stages\.sft\.max_len: .*integer.*, not '12:30'; correct it$"):
        load_recipe(recipe(), ["sft.max_len=12:30"])
    assert load_recipe(recipe(), ["sft.max_len=0100"]).stages["sft"].max_len == 100  # type: ignore[attr-defined]
    assert load_recipe(recipe(), ["store_checkpoints=yes"]).store_checkpoints is True


def test_overrides(recipe: Write) -> None:
    loaded = load_recipe(
        recipe(),
        [
            "ppo.actor_learning_rate=2e-6",
            "stages.sft.data.sources.0.path=other.jsonl",
            "sft.eval_data={sources: held.jsonl}",
            "evaluation.judges.1.tie=0.5",
            "seed=3",
            "base_model=org/model",
        ],
    )
    ppo = loaded.stages["ppo"]
    sft = loaded.stages["sft"]
    evaluation = loaded.stages["evaluation"]
    assert isinstance(ppo, PPO) and isinstance(sft, SFT) and isinstance(evaluation, Evaluation)
    assert (ppo.actor_learning_rate, loaded.seed, loaded.base_model) == (2e-6, 3, "org/model")
    assert sft.data.sources[0].path == "other.jsonl" and sft.eval_data is not None
    assert isinstance(evaluation.judges[1], RewardJudge) and evaluation.judges[1].tie == 0.5


def test_an_override_adds_a_key_to_a_mapping_of_free_keys(recipe: Write) -> None:
    loaded = load_recipe(
        recipe(), ["ppo.engine.options.max_num_seqs=3", "sft.sweep.learning_rate=[1e-5, 2e-5]"]
    )
    ppo = loaded.stages["ppo"]
    sft = loaded.stages["sft"]
    assert isinstance(ppo, PPO) and isinstance(sft, SFT)
    assert ppo.engine.options == {"max_num_seqs": 3} and sft.sweep == {"learning_rate": (1e-5, 2e-5)}
    with pytest.raises(ValueError, match=r"sweep\.learning_rat"):
        load_recipe(recipe(), ["sft.sweep.learning_rat=[1e-5, 2e-5]"])


def test_overrides_are_applied_together_before_the_check(recipe: Write) -> None:
    with pytest.raises(ValueError, match="train_batch_size=12 must be a multiple"):
        load_recipe(recipe(), ["sft.train_batch_size=12", "sft.micro_train_batch_size=8"])
    assert load_recipe(recipe(), ["sft.train_batch_size=12", "sft.micro_train_batch_size=4"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        *rows_of_text("""
    ppo.actor_learning_rat=1 | ppo.actor_learning_rat: unknown key 'actor_learning_rat'; did you mean actor_learning_rate
    ppo.seed=1 | override ppo.seed: seed is a field of the whole recipe: write it at the top (override: seed=...)
    pppo.gamma=1 | unknown stage 'pppo'; did you mean ppo?
    sede=1 | unknown key 'sede'; did you mean seed?
    ppo.gamma | write <stage>.<field>=<value>
    sft.data.sources.4.path=x | sft.data.sources has 1 entries
    sft.eval_data.max_samples=3 | sft.eval_data is None
    sft.max_len=many | stages.sft.max_len: input should be a valid integer
    sft.learning_rate=.inf | stages.sft.learning_rate: input should be a finite number, not inf; correct it
    sft.learning_rate=1e400 | stages.sft.learning_rate: input should be a finite number, not inf; correct it
    sft.learning_rate=true | stages.sft.learning_rate: input should be a valid number, unable to parse string as a number, not 'true'
    ppo.betas=[0.9, .nan] | stages.ppo.betas.1: input should be a finite number, not nan; correct it
    ppo.zero_stage=true | stages.ppo.zero_stage: input should be 'auto', 0, 1, 2 or 3, not 'true'; correct it
    sft.max_len=-1 | stages.sft.max_len: input should be greater than 0, not -1
    sft.data=train.jsonl | stages.sft.data: must be a mapping (sources, template, template_args, max_samples)
    evaluation.judges.0.kind=rul | stages.evaluation.judges.0: kind: unknown value 'rul'; did you mean rule?
    evaluation.judges.0={kind: rule, anser_key: a} | stages.evaluation.judges.0.anser_key: unknown key 'anser_key'; did you mean answer
    ppo.engine={adapters: alone} | stages.ppo: engine.adapters: alone sends adapters, but there are none: set lora, or leave it out
    ppo.engine={sleep: true} | stages.ppo.engine: engine.sleep frees a GPU's memory, but gpus is 0: set gpus, or leave sleep out
    ppo.engine={gpu: 1} | stages.ppo.engine.gpu: unknown key 'gpu'; did you mean gpus?
    ppo.reward.0.weigth=1 | unknown key 'weigth'; did you mean weight
    ppo.reward=[{model: reward_model, weigth: 1}] | stages.ppo.reward.0.weigth: unknown key 'weigth'; did you mean weight
    evaluation.questions=q.jsonl | not 'q.jsonl'; write { path: q.jsonl }
    sft.data=x.jsonl | not 'x.jsonl'; write { sources: x.jsonl }
    ppo.reward=[{kind: functoin, model: rm}] | stages.ppo.reward.0: kind: unknown value 'functoin'; did you mean function
    ppo.reward=[{modle: rm}] | stages.ppo.reward.0.modle: unknown key 'modle'; did you mean model
    ppo.reward=[{function: 'a.py'}] | stages.ppo.reward.0.function: string should match pattern
    ppo.reward=[] | stages.ppo.reward: value should have at least 1 item
    ppo.temperature=0 | stages.ppo: temperature=0 gives the same answer every time
    ppo.min_p=0.9 | unknown key 'min_p'
    ppo.betas=[0.9, 1] | stages.ppo.betas.1: input should be less than 1, not 1; correct it
    ppo.ref_reward_offload=true | stages.ppo: ref_reward_offload frees a GPU's memory, but these groups have no GPU: reference: set gpus
    ppo.adam_offload=true | stages.ppo: adam_offload frees a GPU's memory, but these groups have no GPU: actor, critic: set gpus
    ppo.engine.num_engines=1000000000 | stages.ppo.engine.num_engines: input should be less than or equal to 10000
    ppo.engine.tensor_parallel_size=512 | stages.ppo.engine.tensor_parallel_size: input should be less than or equal to 256
    sft.ranks.num_nodes=1024 | stages.sft.ranks.num_nodes: input should be less than or equal to 1000
    sft.ranks.num_ranks_per_node=1024 | stages.sft.ranks.num_ranks_per_node: input should be less than or equal to 256
    evaluation.models=ppo | stages.evaluation.models: input should be a valid list, not 'ppo'; correct it
    evaluation.models=[] | stages.evaluation.models: list should have at least 1 item, not []; correct it
    SFT.max_len=3 | override SFT.max_len: unknown stage 'SFT'; did you mean sft?
    ppo.reward=[{url: 'http://host', api_key_env: 'sk-1'}] | stages.ppo.reward.0.api_key_env: give the name of an environment
    seed=4294967296 | seed: input should be less than 4294967296
    sft.template='Question:' | stages.sft: template 'Question:' must be 'chat' or hold exactly one {}
    sft.data.template='{} {}' | stages.sft.data: template '{} {}' must be 'chat' or hold exactly one {}
    sft.data.sources.0.path='' | stages.sft.data.sources.0.path: string should have at least 1 character
    name=[ | correct the YAML
    evaluation.endpoints={gpt: {model: x, more: {top_p: .nan}}} | stages.evaluation.endpoints.gpt.more: cannot be sent as JSON
    evaluation.endpoints={gpt: {model: x, base_url: 'localhost:8000/v1'}} | stages.evaluation.endpoints.gpt.base_url: 'localhost:8000/v1' is not an address: begin it with http:// or https://
    evaluation.judges=[{kind: openai, model: x, api_key_env: sk-123}] | stages.evaluation.judges.0.api_key_env: give the name of an environment variable
    """),
        ("ppo.xyzzy=1", "valid: router_aux_coef, "),
        ("sft.lora={targets: []}", "stages.sft.lora.targets: "),
        ("sft\n.max_len=3", "override 'sft\\n.max_len=3': write <stage>.<field>=<value>"),
        (
            "evaluation.endpoints={gpt: {model: x, more: {since: !!timestamp 2024-01-01}}}",
            (
                "stages.evaluation.endpoints.gpt.more: cannot be sent as JSON (Object of type date is not"
                " JSON serializable): write dates in"
            ),
        ),
    ],
)
def test_a_wrong_override_is_one_sentence(recipe: Write, override: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(), [override])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
