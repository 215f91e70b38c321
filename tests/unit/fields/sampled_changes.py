"""Another value of each deciding field of data, preferences stages, evaluations and their records, and where
it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import evaluation.evaluation_stage
import rlhf_core.rollout.vllm.vllm_engine
import rlhf_core.stages.preferences.preferences_stage
import rlhf_core.stages.preferences.sample_answers
from rlhf_core.config import KINDS, Data, EngineConfig, Source
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.documents import Prompt
from rlhf_core.data.rows import verifiers_rows
from rlhf_core.data.rows.row_files import raw_rows
from rlhf_core.data.sources import answer_documents, labelled_answers, preference_pairs, sft_documents
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo import ppo_setup, train
from tests.support.stage_request import stage_request
from tests.unit.fields.change import Change, World
from tests.unit.fields.ppo_probes import PATHS, ppo
from tests.unit.fields.training_changes import ROWS, trained


class Script:
    """Stands for vLLM's engine: answers follow from the prompt and their number; writes down what it is
    asked."""

    told: list[Any] = []  # noqa: RUF012 shared by all

    def __init__(self, model: str, config: EngineConfig, **settings: Any):
        self.told.append((Path(model).name, settings | {"config": config}))

    def load(self, model: str) -> None:
        self.told.append(Path(model).name)

    def close(self) -> None: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], how: Sampling, *pictures: object
    ) -> list[list[SampledAnswer]]:
        return [answers for _, answers in self.stream(prompts, seeds, how)]

    def stream(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], how: Sampling, *pictures: object
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        self.told.append((prompts, how))
        for place, prompt in enumerate(prompts):
            tokens = [
                [10 + (sum(prompt) + j + 7 * len(self.told)) % 30, 11 + j, *[12 + len(self.told)] * j]
                for j in range(how.n)
            ]
            yield (
                place,
                [
                    SampledAnswer([*own[: how.max_new_tokens - 1], how.stop_token_ids[0]], [], True)
                    for own in tokens
                ],
            )


@cache
def answered(kind: str) -> Any:
    """Returns the probe that runs a preferences stage or an evaluation: what engines were asked, metrics, and
    files."""
    module: Any = {
        "preferences": rlhf_core.stages.preferences.preferences_stage,
        "evaluation": evaluation.evaluation_stage,
    }[kind]
    needed: dict[str, Any] = {
        "preferences": {"prompts": {"sources": "prompts.jsonl"}, "reward": "rm"},
        "evaluation": {
            "models": ["other"],
            "baseline": "sft",
            "questions": {"path": "questions.jsonl"},
            "temperature": 1.0,
        },
    }[kind]

    def probe(world: World, fields: Mapping[str, Any]) -> Any:
        for name, rows in ROWS.items():
            world.rows(name, rows)
        world.rows("prompts", [{"prompt": f"What is {i}?"} for i in range(12)])
        for name, more in (("questions", 0), ("others", 5)):
            world.rows(
                name,
                [
                    {"uid": f"q{i}", "prompt": f"What is {i + more}?", "answer": str(i), "known": "5"}
                    for i in range(12)
                ],
            )
        Script.told.clear()
        world.patch.setattr(rlhf_core.rollout.vllm.vllm_engine, "VllmEngine", Script)
        world.patch.setattr(rlhf_core.stages.preferences.sample_answers, "open_engine", Script)
        config = KINDS[kind].config.model_validate(
            {"prompt_max_len": 40, "generate_max_len": 24, **needed, **fields}
        )
        shutil.rmtree(world.folder / "run", ignore_errors=True)
        run = RunDir(world.folder / "run")
        run.path.mkdir()
        inputs = {name: world.place(name) for name in ("sft", "other", "moe", "rm", "rm2")}
        with world.patch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            outcome = module.run(stage_request(config, inputs, name=kind, seed=3), run)
        files = {
            str(file.relative_to(run.path)): file.read_text()
            for file in run.path.rglob("*.json*")
            if file.name != "metrics.jsonl"
        }
        return list(Script.told), outcome.metrics, files

    probe.__name__ = f"answered_{kind}"
    return probe


@cache
def rendered(kind: str) -> Any:
    """Returns the probe of a mixture as documents of a kind of rows, by fields of Data, or of its source as
    `source`."""

    def probe(world: World, fields: Mapping[str, Any]) -> Any:
        for name, rows in ROWS.items():
            world.rows(name, rows)
        both = {
            "margin": 3,
            "chosen": "b",
            "rejected": "a",
            "label": True,
            "reward": 7.0,
            "response": "z",
            "prompt": "p?",
        }
        own = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]
        talk = [
            {
                "messages": own,
                "talk": [own[0], {"role": "assistant", "content": "w"}],
                **both,
                **{f"{k}2": v for k, v in OTHER.items()},
            }
        ]
        world.rows(
            "wide", talk * 3 + [{**talk[0], "label": False, "label2": True, "reward": 1.0, "reward2": 5.0}]
        )
        world.rows(
            "hh",
            [
                {
                    "prompt": "p",
                    "chosen": f"\n\nHuman: a{i}\n\nAssistant: b",
                    "rejected": f"\n\nHuman: a{i}\n\nAssistant: c",
                }
                for i in range(4)
            ],
        )
        given = {name: value for name, value in fields.items() if name in Data.model_fields}
        source = {
            "path": "wide.jsonl",
            "margin_key": "margin",
            **{k: v for k, v in fields.items() if k not in given},
        }
        sources = [source]
        if "probability" in source:
            sources.append({**source, "path": "held.jsonl", "probability": 1 - source["probability"]})
        data = Data.model_validate({"sources": sources, **given})
        renderer = Renderer(
            load_tokenizer(world.place("sft"), False), data.template, template_args=data.template_args
        )
        match kind:
            case "sft":
                return [list(d.tokens) for d in sft_documents(data, renderer, 64, 0).items]
            case "preference":
                pairs = preference_pairs(data, renderer, 64, 0).items
                return [[list(pair.chosen.tokens), list(pair.rejected.tokens), pair.margin] for pair in pairs]
            case "labelled":
                return [
                    [list(item.document.tokens), item.desirable]
                    for item in labelled_answers(data, renderer, 64, 0).items
                ]
        return [list(d.tokens) for d in answer_documents(data, renderer, 64, 0, "reward").documents.items]

    probe.__name__ = f"rendered_{kind}"
    return probe


OTHER = {"prompt": "other?", "response": "y", "chosen": "d", "rejected": "c", "margin": 9, "reward": 2.0}


def summed(world: World, fields: Mapping[str, Any]) -> Any:
    """The term of one source in the sum of rewards."""
    own = {"environment": "guess"} if fields["kind"] == "environment" else {}
    config = ppo(world, {"reward": fields, "advantage_estimator": "reinforce_pp", **own})
    paths = {
        **PATHS,
        **{f"reward:{source.title}": world.place(source.model) for source in config.reward_models},
    }
    return (
        ppo_setup.setup_of(config, [], paths, [0], 0).terms,
        config.groups,
        [paths[name] for name in config.groups if ":" in name],
    )


def generated(world: World, fields: Mapping[str, Any]) -> Any:
    """The rows of a source whose questions are generated."""
    tasks = {"tasks": "gcd", "size": 3}
    return list(raw_rows(Source.model_validate({"reasoning_gym": tasks, **fields}), None))


def questions(world: World, fields: Mapping[str, Any]) -> Any:
    return generated(world, {"reasoning_gym": {"tasks": "gcd", "size": 3, **fields}})


def planted_tasks(world: World, fields: Mapping[str, Any]) -> Any:
    """The rows of a source whose tasks an environment of verifiers gives."""
    world.patch.setattr(verifiers_rows, "_answered", lambda asked, *_: [{"task": asked, "prompt": []}])
    return list(raw_rows(Source.model_validate(fields), None))


def planted_task(world: World, fields: Mapping[str, Any]) -> Any:
    return planted_tasks(world, {"verifiers": {"environment": "a", **fields}})


def asked(world: World, fields: Mapping[str, Any]) -> Any:
    """What the episodes of an environment are started with."""
    told: list[Any] = []
    world.patch.setattr(
        train, "Episodes", lambda environment, renderer, limits, *_: told.append((environment, limits))
    )
    world.patch.setattr(train, "Background", lambda: None)
    world.patch.setattr(train, "Engines", lambda *_: None)
    world.patch.setattr(train, "try_environment", lambda *_: None)
    config = ppo(world, {"environment": {"path": "guess", **fields}, "advantage_estimator": "reinforce_pp"})
    prompt = Prompt((), [], {}, False)
    train.start_rollout_group(config, None, dict.fromkeys(("actor", "sampler")), [prompt])  # type: ignore[arg-type, dict-item]
    return told


SAMPLE = answered("preferences")
BATTLE = answered("evaluation")
HELD_OUT = {"models": ["rm"], "data": {"sources": "held.jsonl"}}


def adapted(world: World, fields: Mapping[str, Any]) -> Any:
    """An SFT stage with these adapters."""
    return trained("sft")(world, {"lora": fields})


def ruled(world: World, fields: Mapping[str, Any]) -> Any:
    """An evaluation by this rule."""
    return BATTLE(world, {"judges": [{"kind": "rule", **fields}]})


def scored(world: World, fields: Mapping[str, Any]) -> Any:
    """An evaluation by this reward judge."""
    return BATTLE(world, {"judges": [{"kind": "reward", "reward": "rm", **fields}]})


def measured(world: World, fields: Mapping[str, Any]) -> Any:
    """An evaluation that measures a reward model."""
    return BATTLE(world, {"reward_evaluation": {**HELD_OUT, **fields}})


def changes(probe: Any, beside: Mapping[str, Any], values: Mapping[str, Any]) -> list[Change]:
    """Returns a change for each field of `values`, made beside the same other fields."""
    return [Change(name, value, probe, beside) for name, value in values.items()]


WEIGHED = {"name": "x", "normalize": "running", "weight": 0.5}
REWARDED = {"judges": [{"kind": "reward", "reward": "rm"}]}
SAMPLED = {
    "preferences": [
        Change("dtype", "bfloat16", SAMPLE),
        Change("first_prompt", 3, SAMPLE),
        Change("generate_max_len", 3, SAMPLE),
        Change("min_reward", 1.45, SAMPLE, {"post_processor": "rejection_sampling"}),
        Change("n_samples_per_prompt", 3, SAMPLE),
        Change("num_prompts", 5, SAMPLE),
        Change("policy", "other", SAMPLE),
        Change("post_processor", "kto", SAMPLE),
        Change("prompt_max_len", 8, SAMPLE),
        Change("prompts", {"sources": "others.jsonl"}, SAMPLE),
        Change("reward", "rm2", SAMPLE),
        Change("stop", ("x",), SAMPLE),
        Change("temperature", 0.5, SAMPLE),
        Change("top_k", 5, SAMPLE),
        Change("top_p", 0.5, SAMPLE),
        Change("engine", {"options": {"max_num_seqs": 3}}, SAMPLE),
    ],
    "evaluation": [
        Change("baseline", "moe", BATTLE),
        Change("bootstrap_rounds", 10, BATTLE, REWARDED),
        Change("dtype", "bfloat16", BATTLE),
        Change("generate_max_len", 2, BATTLE),
        Change("judges", [{"kind": "reward", "reward": "rm"}], BATTLE),
        Change("max_questions", 5, BATTLE),
        Change("models", ["moe"], BATTLE),
        Change("parents", {"other": "moe"}, BATTLE),
        Change("prompt_max_len", 8, BATTLE),
        Change("proxy", "rm2", BATTLE),
        Change("questions", {"path": "others.jsonl"}, BATTLE),
        Change("reward_evaluation", HELD_OUT, BATTLE),
        Change("temperature", 0.0, BATTLE),
        Change("template", "Q: {}", BATTLE),
        Change("template_args", {"note": "ab"}, BATTLE),
        Change("engine", {"options": {"max_num_seqs": 3}}, BATTLE),
    ],
    "Data": [
        Change("max_samples", 2, rendered("sft")),
        Change("sources", [{"path": "rows.jsonl"}], rendered("sft")),
        Change("template", "Q: {}", rendered("preference")),
        Change("template_args", {"note": "ab"}, rendered("preference")),
    ],
    "Source": [
        Change("path", "held.jsonl", rendered("preference")),
        Change("messages_key", "talk", rendered("sft")),
        Change("prompt_key", "prompt2", rendered("preference")),
        Change("response_key", "response2", rendered("labelled")),
        Change("chosen_key", "chosen2", rendered("preference")),
        Change("rejected_key", "rejected2", rendered("preference")),
        Change("margin_key", "margin2", rendered("preference")),
        Change("label_key", "label2", rendered("labelled")),
        Change("reward_key", "reward2", rendered("scored")),
        Change("reasoning_gym", {"tasks": "lcm", "size": 3}, generated, {"path": "reasoning_gym"}),
        Change(
            "verifiers",
            {"environment": "b"},
            planted_tasks,
            {"path": "verifiers", "verifiers": {"environment": "a"}},
        ),
        Change(
            "format",
            "columns",
            rendered("preference"),
            {"path": "hh.jsonl", "margin_key": None, "format": "hh"},
        ),
        Change("probability", 0.25, rendered("preference"), {"path": "pairs.jsonl", "probability": 0.5}),
    ],
    "VerifiersPrompts": [
        Change("environment", "b", planted_task),
        Change("options", {"a": 1}, planted_task),
        Change("dataset", "eval", planted_task),
        Change("size", 2, planted_task),
    ],
    "ReasoningGymPrompts": [
        Change("tasks", ["lcm"], questions),
        Change("size", 2, questions),
        Change("seed", 1, questions),
        Change("instruction", "Be brief.", questions),
        Change("system", "You count.", questions),
    ],
    "Lora": changes(adapted, {}, {"rank": 2, "alpha": 4.0, "targets": ("q_proj",), "export": "adapter"}),
    "ModelReward": [
        Change("model", "rm2", summed, {"kind": "model", "name": "one"}),
        Change("name", "other", summed, {"kind": "model", "model": "rm"}),
        Change("normalize", "running", summed, {"kind": "model", "model": "rm"}),
        Change("weight", 0.5, summed, {"kind": "model", "model": "rm"}),
    ],
    "EnvironmentReward": changes(summed, {"kind": "environment"}, WEIGHED),
    "FunctionReward": changes(
        summed, {"kind": "function", "function": "a.py:f"}, WEIGHED | {"function": "a.py:g"}
    ),
    "CodeReward": changes(summed, {"kind": "code"}, WEIGHED),
    "ReasoningGymReward": changes(summed, {"kind": "reasoning_gym"}, WEIGHED),
    "MathReward": changes(summed, {"kind": "math"}, WEIGHED),
    "HttpReward": changes(
        summed, {"kind": "http", "url": "http://host/"}, WEIGHED | {"url": "http://other/"}
    ),
    "JudgeReward": changes(summed, {"kind": "judge", "judge": {"model": "m"}, "rubric": "r"}, WEIGHED),
    "Environment": [
        Change("answer_max_len", 5, asked),
        Change("images", True, asked),
        Change("max_turns", 3, asked),
        Change("options", {"a": 1}, asked),
        Change("path", "tools", asked),
        Change("agent", "b.py:run", asked, {"path": "agent", "agent": "a.py:run"}),
        Change("checker", "c.py:check", asked, {"path": "agent", "agent": "a.py:run"}),
        Change("mcp", ("http://b/",), asked, {"path": "mcp_tools", "mcp": ("http://a/",)}),
        Change("verifiers", "b", asked, {"path": "verifiers_episodes", "verifiers": "a"}),
        Change("openenv", "http://b", asked, {"path": "openenv_episodes", "openenv": "http://a"}),
    ],
    "RuleJudge": [Change("answer_key", "known", ruled)],
    "RewardJudge": changes(scored, {}, {"reward": "rm2", "tie": 1e9}),
    "RewardEvaluation": changes(
        measured,
        {},
        {"models": ["rm2"], "data": {"sources": "pairs.jsonl"}, "bins": 3, "subset_key": "part"},
    ),
}
