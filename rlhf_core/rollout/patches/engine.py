"""Changes private parts of vLLM. Everything here is for the releases in MADE_FOR; with another one vLLM is left as it is.

- `gather_sampled_alone`: only the sampled token's log-prob is gathered; vLLM also ranks the token among the whole vocabulary.
- `keep_rows`: the arrays of a step are kept whole; vLLM cuts them for each request.
- `wait_for_whole_answers`: the output processor gets each answer once, when it is complete; vLLM's gets every token.
- `find_ranks_in_a_file`: ranks of one machine find each other in a file; vLLM 0.24 opens a port on all interfaces.
- `memory_for_cache`: an engine measures only its own memory; vLLM measures the whole GPU, which other roles use too.

The first three skip Python work per token: with a small model on a fast GPU it takes longer than the GPU's own work. Without them answers
are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.cluster.rank_environment import store_address
from rlhf_core.system import progress

MADE_FOR = ("0.24.", "0.32.")
BESIDES = 2 * 2**30  # bytes besides PyTorch's: CUDA's own, NCCL's, graphs


def applies(releases: tuple[str, ...] = MADE_FOR) -> bool:
    """Returns whether the installed vLLM is one of these releases."""
    import vllm

    return str(vllm.__version__).startswith(releases)


class Rows(NamedTuple):
    """Refers to rows `start` to `end` of a step's arrays: one request's tokens of that step."""

    lists: Any
    start: int
    end: int


def keep_rows() -> None:
    """Makes vLLM keep the arrays of each step whole in this process: an answer holds the `Rows` of its steps."""
    if not applies():
        return
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    def rows(self: Any, request: int, count: int) -> list[Rows]:
        start = request if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[request]
        return [Rows(self, start, start + count)]

    def keep(self: Any, found: list[Rows]) -> None:
        vars(self.logprobs).setdefault("rows", []).extend(found)

    LogprobsLists.slice_request = rows
    LogprobsProcessor._update_sample_logprobs = keep


class Sampled:
    """Counts sampled tokens, and the steps of answers that sampled them: one each, unless tokens are drafted."""

    tokens = 0
    steps = 0

    def __init__(self) -> None:
        self.begun = dict[str, tuple[Any, list[Rows], list[np.ndarray]]]()  # of each unfinished answer: its first output, and all since

    def forget(self, request: str) -> None:
        """Drops what there is of an answer that was aborted."""
        self.begun.pop(request, None)

    def take(self) -> tuple[int, int]:
        """Returns both counts since the last call."""
        found, self.tokens, self.steps = (self.tokens, self.steps), 0, 0
        return found


def wait_for_whole_answers(engine: Any) -> Sampled:
    """Makes vLLM's `engine` give its output processor one output for each answer, with all of its tokens, when the answer is complete.
    A step that samples something counts as progress. Returns a count of the tokens that came one step after the other.

    A request with stop strings gets every output: vLLM looks for them in the text.
    """
    sampled = Sampled()
    if not applies():
        return sampled
    process = engine.output_processor.process_outputs
    begun = sampled.begun

    def complete(outputs: list[Any]) -> Iterator[Any]:
        for output in outputs:
            sampled.tokens, sampled.steps = sampled.tokens + len(output.new_token_ids), sampled.steps + bool(output.new_token_ids)
            state = engine.output_processor.request_states.get(output.request_id)
            if state is not None and getattr(state.detokenizer, "stop", None):
                yield output
                continue
            if (known := begun.get(output.request_id)) is None:
                known = begun[output.request_id] = output, [], []
            else:
                known[0].new_token_ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                known[1].extend(output.new_logprobs)
            if output.routed_experts is not None:
                known[2].append(output.routed_experts.copy())  # a view would keep its whole step's
            if output.finish_reason is not None:
                first, found, experts = begun.pop(output.request_id)
                first.finish_reason, first.stop_reason = output.finish_reason, output.stop_reason
                first.new_logprobs = found or None
                first.routed_experts = np.concatenate(experts) if experts else None
                yield first

    def process_outputs(outputs: list[Any], *others: Any, **named: Any) -> Any:
        if outputs:
            progress.made()
        return process(list(complete(outputs)), *others, **named)

    engine.output_processor.process_outputs = process_outputs
    return sampled


def find_ranks_in_a_file() -> None:
    """Makes engines of one machine find their ranks in a file of this user, as vLLM does from 0.32 on, and not in a store that listens on
    all interfaces. Call it before the engine starts."""
    if not applies():
        return
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for executor in (multiproc_executor, uniproc_executor):
        executor.get_distributed_init_method = lambda *_: store_address()


def gather_sampled_alone(sampler: Any) -> None:
    """Makes vLLM's `sampler` skip the sampled token's rank (0 is returned) where no other token's log-prob is requested.

    Leaves the sampler of vLLM's second model runner, used for some architectures, unchanged: it has no `gather_logprobs`.
    """
    with_ranks = getattr(sampler, "gather_logprobs", None)
    if with_ranks is None or not applies():
        return
    from vllm.v1.outputs import LogprobsTensors

    def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if num_logprobs:
            return with_ranks(logprobs, num_logprobs, token_ids)
        ids = token_ids[:, None]
        return LogprobsTensors(ids.int(), logprobs.gather(-1, ids), torch.zeros_like(token_ids))

    sampler.gather_logprobs = gather


def sampled_logprobs(logprobs: Any, tokens: list[int]) -> list[float]:
    """Returns the log-prob of each token of an answer from vLLM's FlatLogprobs, patched or not: the sampled token comes first.

    Raises RuntimeError when vLLM returned the log-probs of other tokens.
    """
    if (kept := vars(logprobs).get("rows")) is None:
        ids, values = ([column[start] for start in logprobs.start_indices] for column in (logprobs.token_ids, logprobs.logprobs))
    else:
        steps = [(rows.lists, row) for rows in kept for row in range(rows.start, rows.end)]
        ids, values = [lists.logprob_token_ids.item(row, 0) for lists, row in steps], [lists.logprobs.item(row, 0) for lists, row in steps]
    if ids != tokens:
        raise RuntimeError("vLLM returned log-probs of other tokens than those it sampled: install the version that the requirements name")
    return values


def memory_for_cache(worker: Any, run_largest_batch: Callable[[], object]) -> int:
    """Returns the bytes for the KV cache: of the worker's share of the GPU what its own process has not used.

    vLLM compares the GPU's free memory before and after a largest batch, and stops when more is free afterwards, for example because
    another role has sharded its model meanwhile or moved it to the host. Raises ValueError when nothing is left.
    """
    weights, before = sum(weight.nbytes for weight in worker.model_runner.get_model().parameters()), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    worker.cache_config.kv_cache_memory_bytes = 1  # given a size, vLLM runs its largest batch and measures nothing
    run_largest_batch()
    peak = torch.cuda.max_memory_allocated()
    taken = max(peak, weights + peak - before) + BESIDES  # weights of an engine that can sleep may be outside PyTorch's count
    left = int(worker.requested_memory) - taken
    if left <= 0:
        raise ValueError(
            f"weights, the largest batch and {BESIDES / 2**30:g} GiB for CUDA, NCCL and graphs take {taken / 2**30:.1f} GiB, and "
            f"vllm.gpu_memory_utilization grants {worker.requested_memory / 2**30:.1f}: raise it"
        )
    worker.cache_config.kv_cache_memory_bytes = left
    return left
