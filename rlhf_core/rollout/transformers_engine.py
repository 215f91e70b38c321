"""Runs a transformers engine, a `RolloutEngine`, in this process. It samples with transformers' `generate`,
and loads the model as the trainer does.

The engine serves models that vLLM cannot sample, and is slow but exact: it samples answers to prompts of
equal length together, without padding, and starts the next prompts when the longest answer ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from multiprocessing.connection import Client
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import (
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_core.config.engines import EngineConfig
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.documents import Document
from rlhf_core.models.kernels.attention import PLAIN, VARLEN, mask_attention, set_attention
from rlhf_core.models.kernels.liger import fuse
from rlhf_core.models.load_model import load_policy
from rlhf_core.models.logprobs.fp32_head import fp32_forward
from rlhf_core.models.lora import first_base
from rlhf_core.models.multimodal.wrapper import text_names
from rlhf_core.models.picture_reading import reads_pictures
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.objectives.picture_reader import PictureReader
from rlhf_core.rollout.engine_contract import Pictures, Request, SampledAnswer, Sampling, answer_of
from rlhf_core.rollout.pictured_sampling import sample_pictured
from rlhf_core.rollout.weight_transfer import Broadcast, Channel, Rendezvous, Route, SameGpu, gpu_uuid
from rlhf_core.system import progress

BATCH_SIZE = 64  # answers that are sampled at once
LONGEST_PIECE = 8  # tokens that the text of one token may wait for, such as the bytes of a character


class TransformersEngine:
    """Loads a model as the trainer does, one per process. See `RolloutEngine`."""

    first = 0
    version = 0

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        dtype: str,
        trust_remote_code: bool,
        fp32_head: bool = False,
    ):
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory_utilization)
        self._batch_size = int(config.options.get("batch_size", BATCH_SIZE))
        self._dtype = dtype
        self._fp32_head = fp32_head
        self._trust_remote_code = trust_remote_code
        self._requests: list[Request] = []
        self._channel: Channel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._policy: Policy | None = None
        self._reader: PictureReader | None = None  # once a prompt has images
        self._encoder: dict[str, Tensor] = {}  # trained weights of the image encoder that were sent
        self.load(model)
        self.version = 0

    def load(self, model: str) -> None:
        self._free()
        self._path = model
        self._reader = None
        self._encoder = {}
        self._tokenizer = None
        policy = load_policy(model, self._dtype, self._trust_remote_code, on_host=True)
        policy.leave_out_padding(model)
        ends = policy.model.generation_config.eos_token_id
        # vLLM, too, ends answers at these
        self._end_tokens = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self._use(policy)
        self.version += 1

    def _use(self, policy: Policy) -> None:
        """Uses this policy. Replaces attention over packed rows, which has no cache of keys and values."""
        model = policy.model
        if model.config._attn_implementation in (VARLEN, PLAIN):
            mask_attention(model)
        if self._fp32_head:
            policy.fp32_head = True
            head = model.get_output_embeddings()
            vars(head)["forward"] = partial(fp32_forward, head)
        # the checkpoint's own would change the distribution, such as by a repetition penalty
        model.generation_config = GenerationConfig()
        self._policy = policy.to(self._device).eval().requires_grad_(False)

    @property
    def _sampled(self) -> Policy:
        assert self._policy is not None, "it has weights"
        return self._policy

    def _free(self) -> None:
        """Drops the current weights before new weights are loaded, so that the GPU never holds both."""
        self._policy = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> list[list[SampledAnswer]]:
        answers = dict(self.stream(prompts, seeds, sampling, pictures))
        return [answers[i] for i in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        n = sampling.n
        requests = [
            Request(i * n + j, list(prompts[i]), seed + j, sampling, pictures[i] if pictures else ())
            for i, seed in enumerate(seeds)
            for j in range(n)
        ]
        found: dict[int, list[SampledAnswer]] = {}
        for batch in self._batches(requests):
            # stable: the answers to a prompt come in order
            for request, answer in zip(batch, self._answers(batch), strict=True):
                group = found.setdefault(request.key // n, [])
                group.append(answer)
                if len(group) == n:
                    yield request.key // n, found.pop(request.key // n)

    def advance(
        self, requests: Sequence[Request], seconds: float, gone: Sequence[int] = ()
    ) -> list[tuple[int, SampledAnswer]]:
        """Samples one batch to its end, regardless of `seconds`; the other requests continue in the next
        call."""
        self._requests = [request for request in [*self._requests, *requests] if request.key not in gone]
        if not self._requests:
            return []
        oldest = self._requests[0].key
        batches = self._batches(self._requests)
        batch = next(batch for batch in batches if any(request.key == oldest for request in batch))
        keys = {request.key for request in batch}
        self._requests = [request for request in self._requests if request.key not in keys]
        versions = [(0, self.version)]
        answers = [replace(answer, versions=versions) for answer in self._answers(batch)]
        return [(request.key, answer) for request, answer in zip(batch, answers, strict=True)]

    def _batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Groups requests that can be sampled together: their prompts have equal lengths and the same
        settings, and either all or none have images."""

        def kind(request: Request) -> tuple[int, bool, str]:
            return len(request.tokens), bool(request.pictures), repr(request.sampling)

        groups = [list(group) for _, group in groupby(sorted(requests, key=kind), kind)]
        size = self._batch_size
        return [group[start : start + size] for group in groups for start in range(0, len(group), size)]

    @torch.no_grad()
    def _answers(self, batch: Sequence[Request]) -> list[SampledAnswer]:
        sampling = batch[0].sampling
        draws = SeededDraws([request.seed for request in batch], sampling, self._sampled.known)
        ended_by = [*sampling.stop_token_ids, *self._end_tokens]
        ends = AnswerEnds(draws, sampling, ended_by, self._decoder() if sampling.stop else None)
        if batch[0].pictures:
            sample_pictured(self._sampled, self._reads_pictures(), batch, draws, ends)
            return ends.answers()
        tokens = torch.tensor([request.tokens for request in batch], device=self._device)
        self._sampled.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens, do_sample=False, pad_token_id=0
            ),
            logits_processor=[draws],
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        return ends.answers()

    def _reads_pictures(self) -> PictureReader:
        """Returns the reader of images. Loads the encoder when the first images arrive."""
        if self._reader is None:
            whole = first_base(self._path)  # adapters have no image encoder
            tokenizer = load_tokenizer(whole, self._trust_remote_code)
            self._reader = reads_pictures(self._sampled, whole, tokenizer, self._dtype, 1)
            self._take_encoder()
        return self._reader

    def _take_encoder(self) -> None:
        """Gives the encoder the weights that were sent, once it is loaded."""
        if self._encoder and self._sampled.tower is not None:
            self._sampled.tower.take(self._encoder)
            self._encoder = {}

    def _decoder(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path, self._trust_remote_code)
        return self._tokenizer

    @torch.no_grad()
    def prompt_logprobs(
        self, documents: Sequence[Sequence[int]], pictures: Sequence[Pictures] = ()
    ) -> list[list[float]]:
        found = []
        reader = self._reads_pictures() if any(pictures) else None
        for tokens, own in zip(documents, pictures or [()] * len(documents), strict=True):
            document = Document(list(tokens), [False] * len(tokens), pictures=own)
            batch = collate([[document]], pad_token_id=0, reader=reader).to(self._device)
            placed = (batch.tokens, batch.positions, batch.documents)
            logprobs = self._sampled(*placed, pictures=batch.pictures).logprobs[0, : len(tokens)]
            found.append(logprobs.tolist())
            progress.made()
        return found

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights of the model, and the weights of the image encoder that are sent. Collects
        them in host memory, then rebuilds the model. Raises ValueError if some are missing."""
        before = self._sampled
        kind = type(before.model)
        sent = {name: weight.detach().to("cpu", copy=True) for name, weight in weights}
        names = text_names(set(sent))
        options = {
            "config": before.model.config,
            "state_dict": {names[name]: weight for name, weight in sent.items() if name in names},
            "dtype": before.model.dtype,
            "attn_implementation": before.model.config._attn_implementation,
        }
        known = before.known
        tower = before.tower
        self._encoder |= {name: weight for name, weight in sent.items() if name not in names}
        del before, sent
        self._free()
        model, told = kind.from_pretrained(None, output_loading_info=True, **options)
        if told["missing_keys"] or told["unexpected_keys"]:
            lacking = ", ".join(sorted({*told["missing_keys"], *told["unexpected_keys"]})[:3])
            raise ValueError(f"the weights that were sent are not those of {kind.__name__}: {lacking}")
        del options
        policy = Policy(fuse(set_attention(model)))
        policy.known = known
        policy.tower = tower
        self._use(policy)
        self._take_encoder()
        self.version += 1

    def gpu_uuids(self) -> list[str | None]:
        return [gpu_uuid()]

    def open_channel(self, route: Route, rendezvous: Rendezvous) -> None:
        gpu = gpu_uuid()
        if route.kind == "gpus":
            assert gpu is not None
            self._channel = SameGpu([Client(rendezvous.sockets[gpu], authkey=rendezvous.key)])
        else:
            self._channel = Broadcast(route.kind, 1 + self.first, 1 + route.receivers, rendezvous)

    def receive_weights(self, version: int = 0) -> None:
        assert self._channel is not None, "it was opened"
        self.update(self._channel.receive())
        self.version = version

    def sampled(self) -> tuple[int, int]:
        return 0, 0  # it drafts no tokens

    def sleep(self, keep_weights: bool) -> None:
        """Moves the weights to host memory, even if they will be replaced, because the model is rebuilt from
        them."""
        self._sampled.to("cpu")
        if self._sampled.tower is not None:
            self._sampled.tower.move("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._sampled.to(self._device)

    def stay(self) -> None:
        """Returns immediately: this engine has no other processes."""

    def close(self) -> None:
        self._free()
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


class SeededDraws(LogitsProcessor):
    """Draws each row's next token with the row's own random numbers, and keeps it with its log-prob under the
    sampled distribution. Returns logits in which only the drawn token's logit is finite."""

    def __init__(self, seeds: Sequence[int], sampling: Sampling, known: int | None):
        self.tokens: list[Tensor] = []  # one (rows,) tensor per step
        self.logprobs: list[Tensor] = []
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._greedy = sampling.temperature == 0
        self._known = known
        self._warpers: list[Any] = []
        if sampling.temperature not in (0, 1):
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k and not self._greedy:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1 and not self._greedy:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids`: (rows, T). `scores`: (rows, vocabulary), fp32."""
        if self._known is not None:
            scores[:, self._known :] = -torch.inf
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        logprobs = scores.log_softmax(-1)
        tokens = logprobs.argmax(-1) if self._greedy else self._drawn(logprobs)
        self.tokens.append(tokens.cpu())
        self.logprobs.append(logprobs.gather(-1, tokens[:, None])[:, 0].cpu())
        progress.made()
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)

    def _drawn(self, logprobs: Tensor) -> Tensor:
        """Inverts the distribution function at one uniform number per row, in fp64."""
        cumulative = logprobs.double().exp().cumsum(-1)
        uniform = torch.cat([torch.rand(1, generator=each, dtype=torch.float64) for each in self._generators])
        levels = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, levels, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)


class AnswerEnds(StoppingCriteria):
    """Finds where answers end: at a stop token, after a stop text, or at the limit."""

    def __init__(
        self,
        draws: SeededDraws,
        sampling: Sampling,
        ended_by: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ):
        self._draws = draws
        self._stop_tokens = torch.tensor(list(ended_by), dtype=torch.long)
        self._stop_texts = sampling.stop
        self._limit = sampling.max_new_tokens
        self._keeps_logprobs = sampling.logprobs
        self._tokenizer = tokenizer
        self._lengths: dict[int, int] = {}  # of the finished answers, by row

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Returns for each row whether its answer has ended, (rows,)."""
        drawn = self._draws.tokens
        ended = torch.isin(drawn[-1], self._stop_tokens).tolist()
        for row, at_stop_token in enumerate(ended):
            if row not in self._lengths and (at_stop_token or self._at_stop_text(row)):
                self._lengths[row] = len(drawn)
        rows = range(len(ended))
        over = [row in self._lengths or len(drawn) >= self._limit for row in rows]
        return torch.tensor(over, device=input_ids.device)

    def _at_stop_text(self, row: int) -> bool:
        if self._tokenizer is None:
            return False
        longest = max(map(len, self._stop_texts))
        last = [int(tokens[row]) for tokens in self._draws.tokens[-longest - LONGEST_PIECE :]]
        text = self._tokenizer.decode(last, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stop_texts)

    def answers(self) -> list[SampledAnswer]:
        """Returns the answers. Raises FloatingPointError if a log-prob is not finite."""
        tokens = torch.stack(self._draws.tokens, 1).tolist()
        logprobs = torch.stack(self._draws.logprobs, 1).tolist()
        found = []
        for row, of_row in enumerate(tokens):
            length = self._lengths.get(row, len(of_row))
            kept = logprobs[row][:length]
            if not all(map(math.isfinite, kept)):
                raise FloatingPointError("the model's logits are not finite: its weights are broken")
            kept = kept if self._keeps_logprobs else []
            found.append(answer_of(of_row[:length], kept, row in self._lengths))
        return found
