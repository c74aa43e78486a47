"""Offline use: prompts in, texts out."""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sarathi_jax.distributed import Leader
from sarathi_jax.engine import Engine
from sarathi_jax.outputs import RequestOutput
from sarathi_jax.parallel import Parallel
from sarathi_jax.progress import progress_bar
from sarathi_jax.replicas import Replicas
from sarathi_jax.request import SamplingParams

Prompt = str | Mapping[str, Any]
AnyEngine = Engine | Replicas | Leader


class LLM:
    """A model and an engine for whole batches of prompts. Arguments as `Engine.load`.

    With `parallel.data` replicas prompts are shared out among them. In place of a model it takes an engine, or what has
    its methods (`replicas.Replicas`, `distributed.Leader`).

    Streams may be open while others run. Outputs of requests added to `engine` directly wait for whoever steps it.

    >>> llm = LLM("smollm2-135m-instruct", scheduler=Sarathi(token_budget=128))
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text
    """

    def __init__(self, model: str | Path | AnyEngine, **options: Any):
        if isinstance(model, AnyEngine):
            if options:
                raise ValueError(f"{sorted(options)} are for loading a model, and this is an engine already")
            self.engine = model
        else:
            parallel = options.get("parallel")
            is_replicated = isinstance(parallel, Parallel) and parallel.data > 1
            self.engine = (Replicas if is_replicated else Engine).load(model, **options)
        prefix = f"llm-{uuid.uuid4().hex[:8]}"  # nobody else's ids on this engine
        self._ids = (f"{prefix}-{i}" for i in itertools.count())
        self._outputs: dict[str, deque[RequestOutput]] = {}  # of requests made here, until they are taken

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
        prompts = [prompts] if isinstance(prompts, (str, Mapping)) else _listed("prompts", prompts)
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
        """Answers to conversations (one, or a list of them) through the model's chat template.

        `template_options` are variables of the template, such as `add_generation_prompt`; one it does not have is a
        ValueError.
        """
        messages = _listed("messages", messages)
        conversations = [messages] if all(isinstance(message, Mapping) for message in messages) else messages
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
            messages = _listed("prompt", prompt)
            prompt = {"prompt_token_ids": self._encode_chat(messages, template_options)}
        elif template_options:
            raise ValueError(f"options {sorted(template_options)} are for a chat template, and the prompt is no chat")
        stream = self._stream(_split(0, prompt), params)
        next(stream)  # runs to the point where the request is in, and from where dropping the iterator aborts it
        return stream  # pyright: ignore[reportReturnType]

    def _stream(self, prompt: dict[str, Any], params: SamplingParams | None) -> Iterator[RequestOutput | None]:
        (request_id,) = self._add([prompt], [params])
        try:
            yield None
            outputs = self._outputs[request_id]
            while True:
                while outputs:
                    output = outputs.popleft()
                    yield output
                    if output.finished:
                        return
                self._step()
        finally:
            self._drop([request_id])

    def _add(self, prompts: Seq[dict[str, Any]], params: Seq[SamplingParams | None]) -> list[str]:
        """Queue all prompts or none."""
        ids: list[str] = []
        try:
            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                request_id = next(self._ids)
                try:
                    self.engine.add_request(request_id, **prompt, params=param)
                except ValueError as error:
                    raise ValueError(f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from error
                ids.append(request_id)
                self._outputs[request_id] = deque()
        except BaseException:
            self._drop(ids)
            raise
        return ids

    def _drop(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)
            self._outputs.pop(request_id, None)

    def _step(self) -> None:
        """One iteration; its outputs to those who wait for them, whoever of them runs the engine."""
        if not self.engine.has_unfinished():
            raise RuntimeError("requests still awaited here are gone from the engine: another caller aborted them")
        others = []
        for output in self.engine.step():
            if output.request_id in self._outputs:
                self._outputs[output.request_id].append(output)
            else:
                others.append(output)
        self.engine.put_back(others)

    def _encode_chat(self, messages: Any, template_options: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so no chat template")
        known = self.tokenizer.template_variables | {"add_generation_prompt"}
        if unknown := template_options.keys() - known:
            raise ValueError(f"options {sorted(unknown)} are no variables of the chat template; it has {sorted(known)}")
        return self.tokenizer.encode_chat(messages, **template_options)

    def _run(
        self, prompts: list[dict[str, Any]], params: list[SamplingParams | None], progress: bool | None
    ) -> list[RequestOutput]:
        ids = self._add(prompts, params)
        running, finished = set(ids), {}
        try:
            with progress_bar("generating", "prompts", show=progress, delay_s=1.0) as report:
                while running:
                    self._step()
                    for request_id in running & self._outputs.keys():
                        outputs = self._outputs[request_id]
                        if outputs and outputs[-1].finished:
                            finished[request_id] = outputs[-1]
                            running.remove(request_id)
                        outputs.clear()
                    report(len(finished), len(ids))
        finally:
            self._drop(ids)  # on an error or an interrupt nothing stays behind
        return [finished[request_id] for request_id in ids]


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={value!r} must be a list")
    return list(value)


def _split(index: int, prompt: Any) -> dict[str, Any]:
    """add_request's arguments for a prompt."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and set(prompt) in ({"prompt"}, {"prompt_token_ids"}):
        return dict(prompt)
    raise ValueError(f"prompt {index}: {prompt!r} must be a string or a mapping with 'prompt' or 'prompt_token_ids'")
