"""Checks before work: each planted fault is one sentence that names its place; a sound recipe has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.preflight import inputs, machine_checks
from rlhf_core.preflight.inputs import check_inputs, require_here
from rlhf_core.preflight.machine_checks import check_machine, needs
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.system import machine
from rlhf_core.system.machine import MachineLacks
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.text_rows import rows_of_text
from tests.support.tiny_models import save_weights

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """
name: tiny
base_model: base
stages:
  sft: {data: {sources: sft.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}}
  ppo:
    prompts: {sources: prompts.jsonl}
    prompt_max_len: 100
    generate_max_len: 100
    rollout_batch_size: 4
    train_batch_size: 4
    micro_train_batch_size: 1
    actor_ranks: {cpus: 0.4}
    critic_ranks: {cpus: 0.4}
    reference_ranks: {cpus: 0.2}
    reward_ranks: {cpus: 0.2}
    engine: {cpus: 0.8}
  loop:
    stage: iterative_dpo
    prompts: {sources: prompts.jsonl}
    prompt_max_len: 100
    generate_max_len: 100
    rounds: 2
    prompts_per_round: 2
  evaluation: {models: [loop], questions: {path: q.jsonl}, prompt_max_len: 100, generate_max_len: 100}
  publication: {model: loop, evaluation: evaluation}
"""
ROWS = {
    "sft": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    "pairs": {"prompt": "hi", "chosen": "ho", "rejected": "hu"},
    "prompts": {"prompt": "hi"},
    "q": {"prompt": "hi", "answer": "ho"},
}

Planned = Callable[..., Plan]


def save_tokenizer(folder: Path, template: str | None) -> None:
    """Bytes as tokens, with the three tokens a chat needs."""
    fast = byte_tokenizer(eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = template
    fast.save_pretrained(folder)


def check_here(plan: Plan) -> list[str]:
    return check_inputs(plan, plan.nodes) + check_machine(plan, plan.nodes)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine_checks, "num_cpus", lambda: 2)
    monkeypatch.setattr(machine_checks, "num_gpus", lambda: 0)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row | {"uid": number}) + "\n" for number in range(4))
        )
    (tmp_path / "checks.py").write_text(
        "from scorers import brief\n\ndef short(responses): return [0]\n\nlong = short\n"
    )
    (tmp_path / "scorers.py").write_text("def brief(responses): return [0 for _ in responses]\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "wrong.py").write_text(
        "def misspelt(responses): return [len(respones)]\n\ndef renamed(answers): return [0]\n"
    )
    save_tokenizer(tmp_path / "base", TEMPLATE)
    monkeypatch.setattr(machine_checks, "available", lambda: False)  # bubblewrap
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    # a reward model too
    save_weights(
        tmp_path / "base" / "model.safetensors", {"lm_head.weight": (300, 8), "score.weight": (1, 8)}
    )
    return lambda *overrides: plan(load_recipe("recipe.yaml", overrides))


def test_a_sound_recipe_has_no_problems(planned: Planned) -> None:
    assert check_here(planned()) == []
    assert (
        check_here(
            planned(
                "ppo.reward=[reward_model, checks.py:short, checks.py:long, checks.py:brief, 'http://host']"
            )
        )
        == []
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        *rows_of_text("""
    ['sft.data={sources: none.jsonl}'] | ['stages.sft.data: none.jsonl: there is no such file at /']
    ['sft.data={sources: stf.jsonl}'] | ['stf.jsonl; did you mean sft.jsonl?']
    ['sft.data={sources: prompts.jsonl}'] | ['stages.sft.data: prompts.jsonl: there is no column ''response''']
    [base_model=elsewhere/there/is/none] | ['base_model: there is no model folder']
    [ppo.rollout_batch_size=8] | ['stages.ppo.prompts: ppo needs rollout_batch_size=8 prompts, but the data has 4: lower it, or add']
    ['ppo.export_at=[2]'] | ['stages.ppo.prompts: export_at names iteration 2, but the last iteration of this run is 1: lower it']
    [ppo.prompt_max_len=5] | ['stages.ppo.prompt_max_len: a limit of 5 tokens leaves none for text']
    [sft.max_len=3] | ['stages.sft.max_len: a limit of 3 tokens']
    [evaluation.prompt_max_len=5] | ['stages.evaluation.prompt_max_len: a limit of 5 tokens']
    [loop.prompts_per_round=4] | ['stages.loop.round2.preferences: its prompts start at number 4, but there are only 4']
    [ppo.environment=tools] | ['stages.ppo.environment runs programs in bubblewrap (bwrap), which does not work on this machine']
    [ppo.actor_ranks.cpus=2] | ['stages.ppo asks for 3.6 CPUs in all, this machine has 2']
    [ppo.engine.gpus=1] | ['stages.ppo asks for 1 GPUs in all, this machine has 0']
    ['sft.lora={quantize: nf4}'] | ['stages.sft.lora.quantize=nf4 needs an NVIDIA GPU, and this machine has none; set it to none']
    ['sft.ranks={num_nodes: 2, cpus: 0.5}', sft.zero_stage=2] | ['stages.sft asks for 2 nodes, this is one machine']
    ['sft.ranks={gpus: 1, cpus: 4}'] | [stages.sft asks for 4 CPUs, stages.sft asks for 1 GPUs]
    ['evaluation.judges=[{kind: openai, model: gpt, api_key_env: NO_SUCH_KEY}]'] | [needs a key in the environment variable NO_SUCH_KEY]
    ['ppo.reward=[reward_model, none.py:f]'] | [none.py cannot be read (No such file or directory); correct the path]
    ['ppo.reward=[reward_model, checks.py:shrt]'] | ['checks.py: unknown function ''shrt''; did you mean short']
    ['ppo.reward=[reward_model, broken.py:f]'] | [broken.py is no Python file]
    ['ppo.eval_prompts={sources: q.jsonl}'] | ['stages.ppo.eval_prompts: 4 of 4 prompts are questions of evaluation']
    ['ppo.environment=none.py:World'] | [none.py cannot be read (No such file or directory); correct the path of the class]
    ['ppo.environment=checks.py:Wrld'] | ['checks.py: unknown class ''Wrld''']
    [loop.rounds=1, 'loop.reward=checks.py:shrt'] | ['checks.py: unknown function ''shrt''; did you mean short']
    ['evaluation.questions={path: prompts.jsonl}'] | ['stages.evaluation.questions: prompts.jsonl, row 1: there is no column ''answer'', which the rule judge']
    [evaluation.questions.prompt_key=question] | ['stages.evaluation.questions: q.jsonl, row 1: there is no column ''question'', nor ''turns''; its columns are']
    ['ppo.reward=[reward_model, {url: ''http://host'', api_key_env: NO_SUCH_KEY}]'] | ['stages.ppo: the reward host needs a key in the environment variable NO_SUCH_KEY']
    [loop.rounds=1, 'loop.reward=[{url: ''http://host'', api_key_env: NO_SUCH_KEY}]'] | ['stages.loop.round1.preferences: the reward host needs a key in the environment variable NO_SUCH_KEY']
    """),
        (
            ["reward_model.data={sources: [{path: pairs.jsonl, chosen_key: better}]}"],
            [
                "pairs.jsonl: there is no column 'better'; its columns are prompt, chosen, rejected, uid: set"
                " chosen_key: chosen in this"
            ],
        ),
    ],
)
def test_a_fault_is_told_once_and_where(planned: Planned, overrides: list[str], told: list[str]) -> None:
    problems = check_here(planned(*overrides))
    assert len(problems) == len(told)
    for problem, expected in zip(problems, told, strict=True):
        assert expected in problem and "\n" not in problem


@pytest.mark.parametrize(
    ("override", "told"),
    rows_of_text("""
    ppo.reward=[reward_model, wrong.py:misspelt] | stages.ppo.reward: the reward function misspelt: a call with a made-up answer raised NameError: name 'respones' is not defined (
    ppo.reward=[reward_model, wrong.py:renamed] | stages.ppo.reward: a reward function may name
    loop.reward=wrong.py:misspelt | stages.loop.round1.preferences.reward: the reward function misspelt
    """),
)
def test_a_run_calls_reward_functions_once_before_its_first_stage(
    planned: Planned, override: str, told: str
) -> None:
    plan = planned("loop.rounds=1", override)
    with pytest.raises(ValueError) as refused:
        require_here(plan, plan.nodes)
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_a_validation_runs_no_code_of_a_recipe(planned: Planned, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\ndef score(responses): return [0.0 for _ in responses]\n"
    (tmp_path / "called.py").write_text(code)
    plan = planned("ppo.reward=[reward_model, called.py:score]")
    assert check_here(plan) == [] and not ran.exists()
    require_here(plan, plan.nodes)
    assert ran.exists()


def append(file: Path, *rows: object) -> None:
    with file.open("a") as lines:
        lines.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        *rows_of_text("""
    pairs | {prompt: hi, chosen: ho} | reward_model.data: pairs.jsonl, row 61: column 'rejected' is missing or null: fill it
    q | {prompt: '61', answer: null} | evaluation.questions: q.jsonl, row 61: column 'answer' is null, and the rule judge
    q | {prompt: '61', answer: ' '} | evaluation.questions: q.jsonl, row 61: column 'answer' is empty, and the rule judge
    q | {prompt: '61', gold: ho} | evaluation.questions: q.jsonl, row 61: there is no column 'answer', which the rule judge
    """),
        (
            "sft",
            '{"messages": [{"role": "us',
            "sft.data: sft.jsonl, line 61: is not valid JSON: Unterminated string starting at character 24",
        ),
    ],
)
def test_a_wrong_row_far_from_the_first(
    planned: Planned, tmp_path: Path, name: str, wrong: object, told: str
) -> None:
    """Found before work, not by the stage that reads it after others have trained."""
    append(tmp_path / f"{name}.jsonl", *(ROWS[name] | {"uid": number} for number in range(4, 60)), wrong)
    (problem,) = check_here(planned())
    assert problem.startswith(f"stages.{told}") and "\n" not in problem


def test_a_file_is_read_once_for_all_rounds_of_a_loop(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[object] = []
    monkeypatch.setattr(
        inputs, "check_columns", lambda data, kind: checked.append((data.model_dump_json(), kind))
    )
    check_here(planned())
    assert len(checked) == len(set(checked)) > 2


def test_an_empty_data_set(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("")
    problems = check_here(planned())
    assert problems[0].startswith("stages.ppo.prompts: prompts.jsonl: has no rows")


def test_a_model_without_a_chat_template_needs_a_plain_one(planned: Planned, tmp_path: Path) -> None:
    for file in (tmp_path / "base").glob("*token*"):
        file.unlink()
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    save_tokenizer(tmp_path / "base", None)
    problems = check_here(planned())
    assert problems and all(
        "has no chat template: set the template of the data to a plain one" in problem for problem in problems
    )
    assert problems[0].startswith("stages.sft.data: ")
    sft = [p for p in check_here(planned("sft.data.template='{}'")) if p.startswith("stages.sft")]
    assert sft == []


def test_a_folder_that_is_no_model(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "base" / "model.safetensors").unlink()
    assert "has no weights" in check_here(planned())[0]
    (tmp_path / "base" / "config.json").unlink()
    assert "has no config.json" in check_here(planned())[0]


def test_a_model_without_a_tokenizer(planned: Planned, tmp_path: Path) -> None:
    for file in (tmp_path / "base").glob("*token*"):
        file.unlink()
    assert "stages.sft.data: " in check_here(planned())[0]
    assert "no tokenizer can be loaded" in check_here(planned())[0]


def test_artifacts_that_cannot_be_written(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert [
        p
        for p in check_here(planned("artifacts=file/below"))
        if p.startswith("artifacts: nothing can be written to")
    ]


def test_the_users_mistakes_come_before_the_machines(planned: Planned) -> None:
    p = planned("ppo.engine.gpus=1")
    with pytest.raises(MachineLacks, match="1 GPUs"):
        require_here(p, p.nodes)
    require_here(p, [p["sft"]])
    p = planned("ppo.engine.gpus=1", "sft.data={sources: none.jsonl}")
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        require_here(p, p.nodes)


def test_a_vllm_that_is_not_tested_is_said_before_a_run(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.preflight.machine_checks.installed_release", lambda: "0.27.0")
    plan = planned()
    (problem,) = [problem for problem in check_machine(plan, plan.nodes) if "vLLM" in problem]
    assert problem.startswith("vLLM 0.27.0 is not tested")


def test_a_cluster_is_not_this_machine(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    assert check_here(planned("ppo.engine.gpus=1", "ppo.actor_ranks.cpus=64")) == []


def test_needs_sums_what_runs_at_once(planned: Planned) -> None:
    p = planned("ppo.engine.num_engines=3", "ppo.actor_ranks.num_ranks_per_node=2", "ppo.actor_ranks.gpus=1")
    assert needs(p["ppo"].config) == pytest.approx((2 * 0.4 + 0.4 + 0.2 + 0.2 + 3 * 0.8, 2.0, 1))
    critic_free = planned("ppo.advantage_estimator=rloo", "ppo.n_samples_per_prompt=2")["ppo"].config
    assert needs(critic_free).cpus == pytest.approx(0.4 + 0.2 + 0.2 + 0.8)
    two = planned("ppo.reward=[reward_model, {model: org/rm, ranks: {num_nodes: 2, cpus: 0.3}}]")[
        "ppo"
    ].config
    assert needs(two) == pytest.approx((0.4 + 0.4 + 0.2 + 0.2 + 2 * 0.3 + 0.8, 0.0, 2))


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Path,
        "glob",
        lambda self, pattern: iter([Path("/dev/nvidia0"), Path("/dev/nvidia1"), Path("/dev/nvidia-uvm")]),
    )
    for visible, number in ((None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.num_gpus() == number


def test_a_config_that_contradicts_itself_is_one_sentence(planned: Planned, tmp_path: Path) -> None:
    wrong = {"model_type": "gemma3_text", "num_hidden_layers": 3, "layer_types": ["full_attention"]}
    (tmp_path / "base" / "config.json").write_text(json.dumps(wrong))
    problems = check_here(planned())
    told = (
        "base: its config.json contradicts itself (`num_hidden_layers` (3) must be equal to the number of"
        " `layer_types` (1))"
    )
    assert problems and all(told in problem and "\n" not in problem for problem in problems)


def test_a_family_that_vllm_cannot_sample_from_while_it_trains(planned: Planned, tmp_path: Path) -> None:
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gpt_oss"}))
    told = [problem for problem in check_here(planned()) if "vLLM takes no new weights" in problem]
    assert len(told) == 1 and told[0].startswith(f"stages.ppo.actor: {tmp_path / 'base'}: ")
    transformers = check_here(planned("ppo.engine.kind=transformers"))
    assert not any("vLLM takes no new weights" in problem for problem in transformers)


NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)


def test_a_judge_on_engines_is_counted_and_must_take_chat_requests(planned: Planned, tmp_path: Path) -> None:
    def judged(stage: str, name: str, **judge: Any) -> Plan:
        model = {"kind": "vllm", "model": str(tmp_path / name), **judge}
        return planned(f"{stage}.reward={json.dumps([{'judge': model, 'rubric': 'r'}])}", "ppo.critic=base")

    for name, template in (("judge", TEMPLATE), ("plain", None), ("picky", NO_SYSTEM)):
        save_tokenizer(tmp_path / name, template)
        config = json.dumps({"model_type": "llama", "max_position_embeddings": 500})
        (tmp_path / name / "config.json").write_text(config)
        save_weights(tmp_path / name / "model.safetensors", {"lm_head.weight": (300, 8)})
    fitting = {"max_tokens": 99, "engine": {"cpus": 0.1}}
    assert (
        check_here(judged("loop", "judge", **fitting)) == check_here(judged("ppo", "judge", **fitting)) == []
    )
    problems = check_here(judged("ppo", "judge", max_tokens=99, engine={"gpus": 2, "cpus": 0.1}))
    assert problems == [
        "stages.ppo asks for 2 GPUs in all, this machine has 0; lower ranks or gpus of its roles"
    ]
    told = "the model has 500 positions, and max_tokens = 4096 needs more"
    assert [told in problem for problem in check_here(judged("loop", "judge"))] == [True]
    for name, reason in (("plain", "its tokenizer has no chat template"), ("picky", "takes both")):
        (problem,) = check_here(judged("loop", name, **fitting))
        assert (
            problem.startswith(f"stages.loop.reward.judge.model: the judge {tmp_path}") and reason in problem
        )
