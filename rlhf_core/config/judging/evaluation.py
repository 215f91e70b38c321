"""Configures evaluation by battles, its regression suite, reward-model evaluation and the alignment tax."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import Data, Source, TemplateArgs, Text, template_mistakes
from rlhf_core.config.engines import only_in_ppo, without_pipeline
from rlhf_core.config.gates import Asked, AskedServer, Gated, chat_servers
from rlhf_core.config.judging.judges import (
    ChatJudge,
    Endpoint,
    Judge,
    RewardJudge,
    RuleJudge,
    VllmJudge,
    names_of_judge,
)
from rlhf_core.config.judging.lm_eval_tasks import task_name
from rlhf_core.config.process_groups import Groups, Served
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.config.sampled.rewarded_sampling import SamplingFields
from rlhf_core.records import RECIPE_ONLY, Config, NotInDigest, Positive, Rate, check


class RewardEvaluation(Config):
    """Evaluates reward models on held-out preference pairs: accuracy, calibration, length bias, and agreement
    between models."""

    models: tuple[str, ...] = Field(("reward_model",), description="reward models", min_length=1)
    data: Data = Field(description="held-out rows with prompt, chosen and rejected")
    subset_key: str = Field(
        "subset", description="column with the name of a row's subset, for accuracy per subset"
    )
    bins: Positive = Field(10, description="number of bins of the calibration curve")


class Evaluation(Gated, SamplingFields):
    """Pairwise battles of each model against the baseline: two games per question, with the answers
    swapped."""

    stage: Literal["evaluation"] = "evaluation"
    models: tuple[str, ...] = Field(
        description="models to judge, in order; the last one is the final model", min_length=1
    )
    baseline: str = Field("sft", description="model that all others are judged against")
    endpoints: dict[str, Endpoint] = Field(
        {}, description="remote models by name, for use in models, baseline and parents"
    )
    questions: Source = Field(description="rows with a prompt, and the column that a rule judge reads")
    max_questions: Positive | None = Field(None, description="maximum number of questions")
    template: str = Field("chat", description="'chat' or a plain template with one {} for the prompt")
    template_args: TemplateArgs = Field(
        {}, description="arguments of the local models' chat templates by name; for endpoints, use more"
    )
    judges: tuple[Judge, ...] = Field(
        (RuleJudge(),), description="the first judge decides; the others give second opinions", min_length=1
    )
    temperature: float = Field(0.0, ge=0, description="sampling temperature of the answers")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="dtype of the models that answer; auto: the dtype of each checkpoint"
    )
    bootstrap_rounds: Positive = Field(
        1000,
        description=(
            "number of bootstrap resamples of the questions, for style control and over-optimisation"
        ),
    )
    parents: dict[str, str] | None = Field(
        None,
        description=(
            "an additional opponent for each model; default: the model it was trained from; {}: none"
        ),
    )
    # not in the digest: the plan replaces a loop by its judged rounds, which are in the digest
    last_rounds: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description="for a loop in models: how many rounds to judge, counted from the last; default: all",
    )
    style_tokenizer: str | None = Field(
        None,
        description=(
            "tokenizer that measures the answers' lengths: gpt-4o (tiktoken, needs a download), a folder or a"
            " Hub id; default: each model's own"
        ),
    )
    reward_evaluation: RewardEvaluation | None = Field(
        None, description="reward models to evaluate on held-out pairs"
    )
    calibration: Annotated[str | None, NotInDigest] = Field(
        None,
        description="calibration stage of the first judge; the evaluation waits for this stage and its gates",
    )
    proxy: str | None = Field(
        None,
        description=(
            "reward model that was optimised. Its mean score and the judge's win rate, plotted over the KL to"
            " the baseline, are the over-optimisation curve (models: a loop, or STAGE.iterationN of ppo's"
            " export_at). Needs temperature 1"
        ),
    )

    @check
    def _check_template(self) -> Iterator[str]:
        yield from template_mistakes(self.template, self.template_args)

    @check
    def _check_engine(self) -> Iterator[str]:
        if self.engine.num_engines > 1 or self.engine.sleep:
            yield (
                "an evaluation uses one engine: leave engine.num_engines and engine.sleep out"
                " (tensor_parallel_size splits a model)"
            )
        yield from only_in_ppo(self.engine)
        yield from without_pipeline(self.engine)

    @check
    def _check_endpoints(self) -> Iterator[str]:
        named = {self.baseline, *self.models, *(self.parents or {}).values()}
        for name in self.endpoints:
            if name not in named:
                yield (
                    f"the endpoint {name!r} is not used: name it in models, baseline or parents, or remove it"
                )

    @check
    def _sample_for_kl(self) -> Iterator[str]:
        if self.proxy is not None and self.endpoints:
            yield (
                "proxy needs log-probs of all models, which endpoints do not return: move the endpoints to a"
                " separate evaluation"
            )
        if self.proxy is not None and self.temperature != 1:
            yield (
                "proxy measures the KL on the models' answers, which must come from their unscaled"
                " distribution: set temperature to 1"
            )
        if (
            self.proxy is not None
            and isinstance(self.judges[0], RewardJudge)
            and self.judges[0].reward == self.proxy
        ):
            yield (
                f"the proxy {self.proxy} is also the deciding judge, and would agree with itself: put another"
                " judge first"
            )

    @property
    def nested_names(self) -> Sequence[tuple[str, str, str]]:
        rewards = self.reward_evaluation.models if self.reward_evaluation else ()
        parents = (self.parents or {}).items()
        judged = (names_of_judge(f"judges.{i}", judge) for i, judge in enumerate(self.judges))
        return [
            *((f"parents.{model}", name, "policy") for model, name in parents if name not in self.endpoints),
            *((f"reward_evaluation.models.{i}", name, "reward") for i, name in enumerate(rewards)),
            *chain.from_iterable(judged),
        ]

    @property
    def remote_models(self) -> Collection[str]:
        return self.endpoints

    @property
    def answering(self) -> Sequence[tuple[str, str]]:
        named = [("baseline", self.baseline), *(("models", model) for model in self.models)]
        return [(field, name) for field, name in named if name not in self.endpoints]

    def tokenizer_model(self, start: str) -> str | None:
        return next((name for _, name in self.answering), None)

    def loads(self, place: str) -> bool:
        return self.proxy is not None and place.partition(".")[0] in ("models", "baseline")

    def lengths(self, start: str) -> Mapping[tuple[str, str], tuple[int, str]]:
        parents = [name for name in (self.parents or {}).values() if name not in self.endpoints]
        return {
            (f".judges.{i}", judge.model): (judge.max_model_len, "max_model_len")
            for i, judge in enumerate(self.judges)
            if isinstance(judge, VllmJudge) and judge.max_model_len
        } | {("", name): self.most_tokens for name in (*(name for _, name in self.answering), *parents)}

    @property
    def asks(self) -> Asked:
        return Asked(self.questions, self.max_questions)

    @property
    def judges_of_answers(self) -> Sequence[Judge]:
        return self.judges

    @property
    def final_model(self) -> str:
        return self.models[-1]

    @property
    def asked(self) -> Data:
        """The questions, as a data set."""
        return Data(sources=(self.questions,), template=self.template, template_args=self.template_args)

    @property
    def turns(self) -> Sequence[Groups]:
        return [
            {"sampler": self.engine},
            *({"judge": judge.engine} for judge in self.judges if isinstance(judge, VllmJudge)),
        ]

    @property
    def texts(self) -> Sequence[Text]:
        pairs = [self.reward_evaluation.data] if self.reward_evaluation else []
        return [
            Text("questions", self.asked, None, "prompt_max_len", self.prompt_max_len),
            *(
                Text("reward_evaluation.data", data, "preference", "prompt_max_len", self.prompt_max_len)
                for data in pairs
            ),
        ]

    @property
    def servers(self) -> Sequence[AskedServer]:
        judges = ((f"the judge {judge.model}", judge) for judge in self.judges if isinstance(judge, Remote))
        endpoints = ((f"the endpoint {name}", endpoint) for name, endpoint in self.endpoints.items())
        return chat_servers((*judges, *endpoints))


class Regression(Evaluation):
    """Judges a suite of questions that models lost or people reported, as in an evaluation. Reports which
    questions pass, newly fail or recover, and whether the final model's fraction of passed questions is
    within the band of earlier trusted results."""

    stage: Literal["regression"] = "regression"  # type: ignore[assignment]
    questions: Source = Field(
        description="the suite: a file written by `alignflow suite add`, or rows with uid, prompt and reason"
    )
    parents: dict[str, str] | None = Field(
        {}, description="an additional opponent for each model; default: none"
    )
    history: int = Field(
        5,
        ge=0,
        description=(
            "number of earlier results of the stage that form the band, counting only results whose gates"
            " passed; 0: no band"
        ),
    )
    band: Rate = Field(3.0, description="half width of the band, in standard deviations")

    @check
    def _check_judges(self) -> Iterator[str]:
        if any(isinstance(judge, ChatJudge) and judge.interval_width is not None for judge in self.judges):
            yield "a regression suite judges all of its questions: leave interval_width out of the judges"


class AlignmentTax(Gated, Served):
    """Runs lm-eval tasks (IFEval, GSM8K, MMLU or your own) on each model and on the baseline, through a vLLM
    server that the stage starts."""

    stage: Literal["alignment_tax"] = "alignment_tax"
    models: tuple[str, ...] = Field(description="models to measure, in order", min_length=1)
    baseline: str = Field("sft", description="model that the losses are measured against")
    tasks: tuple[str, ...] = Field(
        description="names of lm-eval tasks or groups, and paths of task YAML files", min_length=1
    )
    limit: Positive | None = Field(
        None, description="maximum number of documents per task, taken from the start; default: all"
    )
    num_fewshot: int | None = Field(
        None,
        ge=0,
        description="number of worked examples before each question; default: each task's own number",
    )
    chat_template: bool = Field(
        False, description="wrap questions in the models' chat template; default: plain text, as in lm-eval"
    )
    template_args: TemplateArgs = Field(
        {}, description="with chat_template: arguments of the chat template by name"
    )
    max_gen_toks: Positive = Field(
        256, description="maximum answer length in tokens, for tasks that do not set one"
    )
    batch_size: Annotated[Positive, NotInDigest] = Field(8, description="prompts per request")
    concurrency: Annotated[Positive, NotInDigest] = Field(8, description="requests in flight")
    timeout: Annotated[Rate, NotInDigest] = Field(
        300.0, description="time limit in seconds for one request of lm-eval"
    )
    trust_task_code: bool = Field(
        False,
        description="allow a local task YAML to run the Python code that it names (`!function`)",
        json_schema_extra=RECIPE_ONLY,
    )
    bootstrap_rounds: Positive = Field(1000, description="number of bootstrap resamples of the documents")

    @check
    def _check(self) -> Iterator[str]:
        if set(self.models) == {self.baseline}:
            yield (
                f"models names only the baseline {self.baseline!r}, which cannot lose against itself: name"
                " another model"
            )
        yield from template_mistakes("chat", self.template_args)
        if self.template_args and not self.chat_template:
            yield "template_args apply only to questions in the chat template: set chat_template to true"
        names = [task_name(task) for task in self.tasks]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled:
            yield f"tasks names {doubled!r} twice: list each task once, and give YAML files different names"

    @property
    def turns(self) -> Sequence[Groups]:
        return [{"sampler": self.engine}]

    def lengths(self, start: str) -> Mapping[tuple[str, str], tuple[int, str]]:
        if self.max_model_len is None:
            return {}
        return {("", name): (self.max_model_len, "max_model_len") for name in (self.baseline, *self.models)}
