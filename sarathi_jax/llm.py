"""Offline use: prompts in, texts out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sarathi_jax.engine import Engine
from sarathi_jax.outputs import RequestOutput
from sarathi_jax.request import SamplingParams

Prompt = str | Mapping[str, Any]


class LLM:
    """A model and an engine for whole batches of prompts. Arguments as `Engine.load`.

    >>> llm = LLM("smollm2-135m-instruct", scheduler=Sarathi(token_budget=128))
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text
    """

    def __init__(self, model: str | Path, **options: Any):
        self.engine = Engine.load(model, **options)
        self._ids = (f"llm-{i}" for i in itertools.count())

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts: texts, or mappings with `prompt` or `prompt_token_ids`.

        `params` one for all, or one each. `progress` None shows a bar on a terminal when it takes longer than a moment.
        A prompt that cannot run is a ValueError that names it, before any has run.
        """
        prompts = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        each: list[SamplingParams | None]
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} SamplingParams for {len(prompts)} prompts; give one, or one for each")
        return self._run([_split(i, prompt) for i, prompt in enumerate(prompts)], each, progress)

    def chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers to conversations (one, or a list of them) through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt_token_ids": self._encode_chat(m, template_options)} for m in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self,
        prompt: Prompt | Seq[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """One prompt (or conversation), its output after every token; `delta` is the new text. Leaving early aborts."""
        if not isinstance(prompt, (str, Mapping)):
            prompt = {"prompt_token_ids": self._encode_chat(prompt, template_options)}
        request_id = next(self._ids)
        self.engine.add_request(request_id, **_split(0, prompt), params=params)
        return self._stream(request_id)

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        yield output
                        if output.finished:
                            return
        finally:
            self.engine.abort(request_id)

    def _encode_chat(self, messages: Any, template_options: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so no chat template")
        return self.tokenizer.encode_chat(messages, **template_options)

    def _run(
        self, prompts: list[dict[str, Any]], params: list[SamplingParams | None], progress: bool | None
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                request_id = next(self._ids)
                try:
                    self.engine.add_request(request_id, **prompt, params=param)
                except ValueError as error:
                    raise ValueError(f"prompt {i}: {error}") from error
                ids.append(request_id)
            disable = None if progress is None else not progress
            with tqdm(
                total=len(ids), desc="generating", unit=" prompts", delay=1.0, leave=False, disable=disable
            ) as bar:
                while len(finished) < len(ids):
                    for output in self.engine.step():
                        if output.finished:
                            finished[output.request_id] = output
                            bar.update()
        finally:
            for request_id in ids:  # on an error or an interrupt nothing stays behind
                self.engine.abort(request_id)
        return [finished[request_id] for request_id in ids]


def _split(index: int, prompt: Any) -> dict[str, Any]:
    """add_request's arguments for a prompt."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and set(prompt) in ({"prompt"}, {"prompt_token_ids"}):
        return dict(prompt)
    raise ValueError(f"prompt {index}: {prompt!r} must be a string or a mapping with 'prompt' or 'prompt_token_ids'")
