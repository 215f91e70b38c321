"""The alignment tax: what a model lost on tasks that alignment was not about."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.gates import Gated
from rlhf_core.config.rounds import Vllm, check_server
from rlhf_core.tax_tasks import task_name
from rlhf_core.types import Positive, Rate


class AlignmentTax(Gated):
    """Tasks of lm-eval (IFEval, GSM8K, MMLU, your own) on each model and on the baseline, served by a vLLM server of our own."""

    stage: Literal["alignment_tax"] = "alignment_tax"
    models: tuple[str, ...] = Field(description="models to measure, in order", min_length=1)
    baseline: str = Field("sft", description="model that the losses are counted from")
    tasks: tuple[str, ...] = Field(description="names of lm-eval's tasks or groups, and paths of task YAML files", min_length=1)
    limit: Positive | None = Field(None, description="at most this many documents of each task, the first ones; default: all")
    num_fewshot: int | None = Field(None, ge=0, description="worked examples before each question; default: as each task says")
    chat_template: bool = Field(False, description="ask in the models' chat template; default: as plain text, lm-eval's own default")
    max_model_len: Positive | None = Field(None, description="longest prompt and answer together, in tokens; default: the model's own")
    max_gen_toks: Positive = Field(256, description="longest answer in tokens, where a task does not say")
    batch_size: Positive = Field(8, description="prompts in one request")
    concurrency: Positive = Field(8, description="requests in flight")
    timeout: Rate = Field(300.0, description="seconds one request may take")
    trust_task_code: bool = Field(False, description="let a task YAML of yours run the Python that it names (`!function`)")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: as each checkpoint says")
    bootstrap_rounds: Positive = Field(1000, description="bootstrap resamples of the documents")
    vllm: Vllm = Vllm()

    @model_validator(mode="after")
    def _check(self) -> AlignmentTax:
        check_server(self.vllm)
        if set(self.models) == {self.baseline}:
            raise ValueError(f"models names only the baseline {self.baseline!r}, which loses nothing against itself: name another model")
        names = [task_name(task) for task in self.tasks]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"tasks names {doubled!r} twice: give each task once, and YAML files different names")
        return self
