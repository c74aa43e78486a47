"""Engines for the tests: a tiny random model whose programs are compiled once, or a script in the model's place."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import pytest

import sarathi_jax as sj
from sarathi_jax.config import CacheConfig, ModelConfig
from sarathi_jax.engine import Engine
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.weights import init_weights
from sarathi_jax.outputs import RequestOutput
from sarathi_jax.request import Sequence, StepPlan
from sarathi_jax.runner import ModelRunner, ReadStep
from sarathi_jax.tokenizer import Tokenizer

VOCAB_SIZE = 264  # 256 bytes, two special tokens, and rows that the tokenizer does not know
MAX_MODEL_LEN = 96
PAGE_SIZE = 8


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """Two layers in float32; weights so large that no two tokens are close."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=256,
    )
    return Decoder(config, init_weights(config, jnp.dtype(jnp.float32), seed=1, scale=0.2))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 ends a text, 257 is a control token."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(b) if b in own else chr(next(others)) for b in range(256)]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*letters, "<|end|>", "<|mark|>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 256,
        }
    )


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def new_engine(tiny_model, byte_tokenizer) -> Callable[..., Engine]:
    """Engines without programs: what compiles is up to the caller."""

    def new(
        *,
        budget: int = 64,
        max_num_seqs: int = 16,
        num_pages: int = 192,
        tokenizer: Tokenizer | None = byte_tokenizer,
        max_model_len: int = MAX_MODEL_LEN,
        eos_token_ids: tuple[int, ...] = (),
        lookahead: int = 0,
        **options,
    ) -> Engine:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="token_budget=")
            return Engine(
                tiny_model,
                tokenizer,
                scheduler=sj.Sarathi(token_budget=budget, max_num_seqs=max_num_seqs),
                cache=CacheConfig(page_size=PAGE_SIZE, num_pages=num_pages),
                max_model_len=max_model_len,
                eos_token_ids=eos_token_ids,
                lookahead=lookahead,
                **options,
            )

    return new


@pytest.fixture(scope="session")
def make_engine(new_engine, tiny_model) -> Callable[..., Engine]:
    """Engines on the tiny model in three shapes; those with as many pages and slots share their programs."""
    programs: dict[object, tuple[dict, list]] = {}

    def make(**options) -> Engine:
        engine = new_engine(**options)
        most = engine.runner.shapes.num_tokens[-1]
        shapes = replace(engine.runner.shapes, num_tokens=(*(n for n in (16, 64, 256) if n < most), most))
        runner = ModelRunner(tiny_model, shapes, stop_ids=engine.eos_token_ids)
        compiled, write_slot = programs.setdefault(replace(shapes, num_tokens=()), ({}, []))
        if not write_slot:
            write_slot.append(runner._compile_write_slot())
        runner._compiled, runner._write_slot = compiled, write_slot[0]
        engine.runner = runner
        return engine

    return make


@dataclass
class Script:
    """A runner without a model: `token(sequence, position)` is what comes there; `on_read` runs in each read."""

    token: Callable[[Sequence, int], int]
    on_read: Callable[[], None] = lambda: None
    plans: list[StepPlan] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> ScriptedStep:
        self.plans.append(plan)
        return ScriptedStep(self, plan)


class ScriptedStep:
    num_padding = collective_bytes = 0

    def __init__(self, script: Script, plan: StepPlan) -> None:
        self.script, self.chunks = script, plan.chunks
        self._tokens = [script.token(chunk.sequence, chunk.end) for chunk in plan.chunks]

    def read(self) -> ReadStep:
        self.script.on_read()
        return ReadStep(self._tokens, None, None, (0,) * len(self.chunks))


def hashed(seq: Sequence, position: int) -> int:
    """A letter that depends on the prompt, the sample and the position."""
    return 97 + (hash(seq.prompt_token_ids) // 7 + 5 * seq.index + position * position) % 26


@pytest.fixture(scope="session")
def scripted(new_engine) -> Callable[..., Engine]:
    """Engines that play a script: a token list for all, or a function of sequence and position."""

    def make(script=hashed, *, on_read: Callable[[], None] = lambda: None, **options) -> Engine:
        engine = new_engine(**options)
        if not callable(script):
            script_ids = list(script)
            script = lambda seq, position: script_ids[(position - seq.prompt_len) % len(script_ids)]
        engine.runner = Script(script, on_read)
        return engine

    return make


@dataclass
class Log:
    """What an engine gave out: every output by request, and the last one of each."""

    events: dict[str, list[RequestOutput]] = field(default_factory=dict)
    num_steps: int = 0
    num_preempted: int = 0

    @property
    def final(self) -> dict[str, RequestOutput]:
        return {name: outputs[-1] for name, outputs in self.events.items()}

    def token_ids(self) -> dict[str, list[list[int]]]:
        return {name: [c.token_ids for c in output.outputs] for name, output in self.final.items()}


def drain(
    engine: Engine, *, before_step: Callable[[int], None] | None = None, max_steps: int = 3000, idle: bool = True
) -> Log:
    """Step until nothing is left, checking every promise about pages, outputs and ends on the way."""
    log = Log()
    while engine.has_unfinished():
        if before_step:
            before_step(log.num_steps)
        outputs = engine.step()
        log.num_steps += 1
        assert log.num_steps < max_steps, f"no end after {max_steps} steps"
        engine.check_integrity()
        engine.scheduler.check_integrity()
        if engine.last_step is not None:
            log.num_preempted += engine.last_step.num_preempted
            engine.last_step = None
        names = [output.request_id for output in outputs]
        assert len(set(names)) == len(names), f"two outputs of one request in a step: {names}"
        for output in outputs:
            earlier = log.events.setdefault(output.request_id, [])
            assert not (earlier and earlier[-1].finished), f"an output after the end of {output.request_id}"
            earlier.append(output)
    if idle:
        assert_idle(engine)
    for name, outputs in log.events.items():
        check_stream(name, outputs, engine.tokenizer is not None)
    return log


def assert_idle(engine: Engine) -> None:
    """Nothing is held, queued or remembered."""
    assert engine.pool.num_free == engine.pool.num_pages, f"pages are held by nobody: {engine.pool}"
    assert not engine._by_sequence, "sequences are remembered"
    assert not engine._live, "requests are remembered"
    assert not engine.scheduler.has_unfinished
    assert sorted(engine.scheduler._free_slots) == list(range(engine.scheduler.config.max_num_seqs))


def check_stream(name: str, outputs: list[RequestOutput], has_text: bool) -> None:
    """The events of one request add up to its last one."""
    for i, final in enumerate(outputs[-1].outputs):
        steps = [output.outputs[i] for output in outputs]
        ended = [s.finish_reason is not None for s in steps]
        assert ended == sorted(ended), f"{name}/{i} ended and went on"
        reasons = {s.finish_reason for s in steps} - {None}
        assert len(reasons) == outputs[-1].finished, f"{name}/{i} must end for one reason: {reasons}"
        for earlier, later in itertools.pairwise(steps):
            assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids, f"{name}/{i} took tokens back"
            assert len(later.token_ids) - len(earlier.token_ids) in (0, 1)
        assert any(s.token_ids for s in steps[:1]) or len(outputs[0].outputs) > 1, f"{name}: an event without a token"
        if has_text:
            assert "".join(s.delta for s in steps) == final.text, f"{name}/{i}: the deltas are not the text"
        if final.logprobs is not None:
            assert len(final.logprobs) == len(final.token_ids)
        assert len(final.metrics.token_s) == len(final.token_ids)


@pytest.fixture(scope="session", name="drain")
def drain_fixture() -> Callable[..., Log]:
    return drain


@pytest.fixture(scope="session", name="assert_idle")
def assert_idle_fixture() -> Callable[[Engine], None]:
    return assert_idle
