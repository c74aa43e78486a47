"""A request in progress as its caller sees it: text, logprobs, times, and when it ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from sarathi_jax.detokenizer import Detokenizer
from sarathi_jax.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from sarathi_jax.request import Chunk, Request, Sequence
from sarathi_jax.runner import TokenScores
from sarathi_jax.tokenizer import Tokenizer


class Generation:
    """One sequence and what it has said. `finish_reason` is None until it ends."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None):
        p = seq.params
        self.seq = seq
        self.tokenizer = tokenizer
        self.metrics = RequestMetrics(arrival_s=seq.request.arrival_time_s)
        self.logprobs: list[dict[int, Logprob]] | None = None if p.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                seq.prompt_token_ids,
                stop=tuple(p.stop or ()),
                include_stop=p.include_stop_str_in_output,
                skip_special_tokens=p.skip_special_tokens,
            )

    def add_token(
        self, token: int, scores: TokenScores | None, row: int, *, eos_token_ids: Collection[int], now: float
    ) -> None:
        """Take a token that was read at `now`, its scores in `row`; sets `finish_reason` if it is the last."""
        seq, p, text = self.seq, self.seq.params, self._detokenizer
        seq.output_token_ids.append(token)
        seq.num_pending -= 1
        self.metrics.token_s.append(now)
        self.metrics.first_scheduled_s = seq.first_scheduled_s
        self.metrics.num_preemptions = seq.num_preemptions
        if self.logprobs is not None and scores is not None:
            self.logprobs.append(candidates(self.tokenizer, scores, row, token, p.logprobs or 0))
        num_outputs = len(seq.output_token_ids)
        if token in (p.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token
        elif token in eos_token_ids and not p.ignore_eos:
            self.finish_reason = "stop"
        hidden = self.finish_reason and not p.include_stop_str_in_output  # the text ends before the stop token
        if text is not None and not hidden and text.push(token, check_stop=num_outputs >= p.min_tokens):
            self.finish_reason, self.stop_reason = "stop", text.stop_reason
        if self.finish_reason is None and seq.prompt_len + num_outputs >= seq.max_total_tokens:
            self.finish_reason = "length"
        # What was held back comes out at the end, and may complete a stop string.
        if self.finish_reason is not None and text is not None and text.finish():
            self.finish_reason, self.stop_reason = "stop", text.stop_reason

    def output(self, *, changed: bool) -> CompletionOutput:
        """A snapshot. `changed`: it has new text to hand out."""
        text = self._detokenizer
        return CompletionOutput(
            index=self.seq.index,
            text=text.text if text else "",
            delta=text.take_delta() if text and changed else "",
            token_ids=list(self.seq.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            metrics=replace(self.metrics, token_s=list(self.metrics.token_s)),
        )


@dataclass(eq=False, kw_only=True)
class LiveRequest:
    """A request until all its generations have ended."""

    request: Request
    tokenizer: Tokenizer | None
    generations: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None for _ in self.request.prompt_token_ids]

    def add_prompt_scores(self, chunk: Chunk, scores: TokenScores, first_row: int) -> None:
        """Take the scores of the prompt tokens that follow a chunk's, which stand in rows from `first_row` on."""
        ids, k = self.request.prompt_token_ids, self.request.params.prompt_logprobs
        if self.prompt_logprobs is None or k is None or chunk.sequence.index:
            return
        for position in range(chunk.start + 1, min(chunk.end + 1, len(ids))):
            row = first_row + position - 1 - chunk.start
            self.prompt_logprobs[position] = candidates(self.tokenizer, scores, row, ids[position], k)

    def output(self, changed: Collection[Generation]) -> RequestOutput:
        """A snapshot; only the generations that changed hand out new text."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            outputs=tuple(generation.output(changed=generation in changed) for generation in self.generations),
        )


def candidates(tokenizer: Tokenizer | None, scores: TokenScores, row: int, chosen: int, k: int) -> dict[int, Logprob]:
    """The k likeliest tokens of a row, best first, and the chosen one."""
    decode = lambda token: tokenizer.decode([token], skip_special_tokens=False) if tokenizer else ""
    top = zip(scores.top_ids[row, :k].tolist(), scores.top[row, :k].tolist(), strict=True)
    found = {token: Logprob(value, rank, decode(token)) for rank, (token, value) in enumerate(top, 1)}
    if chosen not in found:
        found[chosen] = Logprob(float(scores.chosen[row]), None, decode(chosen))
    return found
