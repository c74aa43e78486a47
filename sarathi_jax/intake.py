"""What an engine takes in: prompts and parameters checked against the model, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sarathi_jax.config import check_instance, check_number
from sarathi_jax.request import Request, SamplingParams
from sarathi_jax.tokenizer import Tokenizer


class Intake:
    """Makes requests for a model of this vocabulary and length; ValueError, with the rule, for one that cannot be."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._max_prompt_chars = _max_prompt_chars(tokenizer, max_model_len)

    def request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Iterable[int] | None,
        params: SamplingParams | None,
        *,
        arrival_time: float | None,
        priority: int,
        now: float,
    ) -> Request:
        """The request of `Engine.add_request`'s arguments; it arrives `now` unless they say when."""
        params = SamplingParams() if params is None else check_instance("params", params, SamplingParams)
        params = replace(params)  # our own: the caller's holds a dict
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id={request_id!r} must be a non-empty string")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority={priority!r} must be an integer; lower is sooner")
        if arrival_time is not None:
            check_number("arrival_time", arrival_time, -1e300, 1e300, "seconds on the engine's clock")
        token_ids = self._prompt_ids(prompt, prompt_token_ids)
        self.check_ids("logit_bias", params.logit_bias or ())
        self.check_ids("stop_token_ids", params.stop_token_ids or ())
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer, and this engine has none; use stop_token_ids")
        return Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time_s=now if arrival_time is None else arrival_time,
            priority=priority,
        )

    def check_ids(self, name: str, ids: Iterable[Any]) -> None:
        """ValueError unless all are token ids."""
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < self.vocab_size:
                raise ValueError(f"{name} has {token!r}; token ids are integers in [0, {self.vocab_size})")

    def _prompt_ids(self, prompt: str | None, token_ids: Iterable[int] | None) -> tuple[int, ...]:
        if (prompt is None) == (token_ids is None):
            raise ValueError("give either prompt (text) or prompt_token_ids, and not both")
        if prompt is not None:
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give prompt_token_ids")
            if isinstance(prompt, str) and len(prompt) > self._max_prompt_chars:
                raise ValueError(
                    f"the prompt has {len(prompt)} characters, more than max_model_len={self.max_model_len} tokens "
                    f"can hold"
                )
            token_ids = self.tokenizer.encode(prompt)
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable):
            raise ValueError(f"prompt_token_ids={token_ids!r} must be a list of token ids")
        ids = tuple(token_ids)
        if not ids:
            raise ValueError(f"the prompt is empty: {prompt=} makes no token; at least one is needed")
        self.check_ids("prompt_token_ids", ids)
        return tuple(map(int, ids))


def _max_prompt_chars(tokenizer: Tokenizer | None, max_model_len: int) -> int:
    """No text longer than this can be short enough in tokens; several times over, as tokenizers may shrink a text."""
    if tokenizer is None:
        return 0
    longest = max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)
    return max(4 * longest * max_model_len, 1 << 16)
