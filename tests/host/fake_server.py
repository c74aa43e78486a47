"""A server of the driver on a clock of its own: requests in order of arrival, so many at a time, one token a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from sarathi_jax.outputs import ChunkStats, CompletionOutput, RequestMetrics, RequestOutput, StepStats
from sarathi_jax.request import SamplingParams


@dataclass(frozen=True)
class Item:
    arrived_at_s: float
    num_prefill_tokens: int = 4
    num_decode_tokens: int = 1


class Items(list):
    """A workload of which only times and lengths matter."""

    def token_ids(self, i, *, vocab_size, seed):
        return tuple((seed + i + k) % vocab_size for k in range(self[i].num_prefill_tokens))

    def with_rate(self, requests_per_s):
        first, n = self[0].arrived_at_s, len(self)
        factor = (n - 1) / (self[-1].arrived_at_s - first) / requests_per_s
        return Items(Item((x.arrived_at_s - first) * factor, x.num_prefill_tokens, x.num_decode_tokens) for x in self)


@dataclass
class Asked:
    prompt: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    tokens: list[int] = field(default_factory=list)


class FakeServer:
    """`step_s(server)` is how long the next step takes; `num_at_once` requests run side by side.

    The first step of a request runs its prompt and gives its first token; each step gives `tokens_a_step` tokens.
    `max_len` refuses what is longer. `on_step` runs in each step, before it does anything.
    """

    vocab_size = 100

    def __init__(
        self,
        step_s: Callable[[FakeServer], float] | float = 1.0,
        *,
        num_at_once: int = 1,
        tokens_a_step: int = 1,
        max_len: int = 1000,
        on_step: Callable[[FakeServer], None] = lambda server: None,
        now: float = 0.0,
    ):
        self.step_s = step_s if callable(step_s) else lambda server: step_s
        self.num_at_once, self.tokens_a_step, self.max_len, self.on_step = num_at_once, tokens_a_step, max_len, on_step
        self.clock = now
        self.asked: dict[str, Asked] = {}
        self.log: list[tuple] = []
        self.arrivals: dict[str, float] = {}
        self.last_step: StepStats | None = None
        self.num_steps = 0

    @property
    def has_unfinished(self):
        return bool(self.asked)

    def now(self):
        return self.clock

    def wait_until(self, time_s):
        assert not self.has_unfinished
        self.log.append(("wait", time_s))
        self.clock = max(self.clock, time_s)

    def add_request(self, request_id, *, prompt_token_ids, params, arrival_time):
        prompt = list(prompt_token_ids)
        if len(prompt) > self.max_len:
            raise ValueError(f"{len(prompt)} tokens are more than {self.max_len}")
        assert self.clock >= arrival_time, "sent before its time"
        assert request_id not in self.asked
        self.log.append(("add", request_id, self.clock))
        self.arrivals[request_id] = arrival_time
        self.asked[request_id] = Asked(prompt, params, RequestMetrics(arrival_s=arrival_time))

    def abort(self, request_id):
        return self.asked.pop(request_id, None) is not None

    def step(self):
        self.on_step(self)
        start = self.clock
        running = list(itertools.islice(self.asked.items(), self.num_at_once))
        self.clock += self.step_s(self)
        self.num_steps += 1
        chunks, outputs = [], []
        for name, asked in running:
            if asked.tokens:
                chunks.append(ChunkStats(name, 0, len(asked.prompt) + len(asked.tokens) - 1, 1))
            else:
                asked.metrics.first_scheduled_s = start
                chunks.append(ChunkStats(name, 0, 0, len(asked.prompt)))
            n = min(self.tokens_a_step, asked.params.max_tokens - len(asked.tokens))
            asked.tokens += [7] * n
            asked.metrics.token_s += [self.clock] * n
            finished = len(asked.tokens) == asked.params.max_tokens
            if finished:
                del self.asked[name]
            outputs.append(self._output(name, asked, "length" if finished else None))
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        self.last_step = StepStats(
            chunks=tuple(chunks),
            start_s=start,
            wall_s=self.clock - start,
            host_s=0.25 * (self.clock - start),
            num_prefill_tokens=sum(chunk.num_tokens for chunk in chunks) - num_decodes,
            num_decode_tokens=num_decodes,
            num_padding=1,
            num_preempted=0,
            num_pages_held=len(running),
            num_pages=100,
        )
        return outputs

    def _output(self, name, asked, reason):
        completion = CompletionOutput(
            index=0, text="", delta="", token_ids=list(asked.tokens), finish_reason=reason, stop_reason=None,
            logprobs=None, metrics=asked.metrics,
        )  # fmt: skip
        return RequestOutput(
            request_id=name, prompt=None, prompt_token_ids=tuple(asked.prompt), prompt_logprobs=None,
            outputs=(completion,),
        )  # fmt: skip
