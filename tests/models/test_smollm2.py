"""SmolLM2-135M-Instruct in float32 against transformers: logits, tokens and prompt logprobs of twelve prompts."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax.config import CacheConfig
from sarathi_jax.engine import Engine
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.hub import fetch_default_model
from sarathi_jax.models.weights import load_weights
from sarathi_jax.request import SamplingParams

FILE = np.load(Path(__file__).parent.parent / "golden" / "smollm2.npz")
NAMES = json.loads(str(FILE["meta"]))["names"]
SHORT = [name for name in NAMES if name != "ledger"]
LOGIT_NOISE = 2e-3  # absolute: twice what two float32 runs differ by on the longest prompt


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(fetch_default_model())


@pytest.fixture(scope="module")
def model(checkpoint):
    return Decoder(checkpoint.config, load_weights(checkpoint, jnp.dtype(jnp.float32)))


def tokens_of(name: str) -> list[int]:
    return [*FILE[f"{name}/prompt_ids"].tolist(), *FILE[f"{name}/continuation"].tolist()]


def check(name: str, chunk: int, logits: np.ndarray) -> None:
    """Stored logits within 1e-4 (Frobenius, relative); the stored five likeliest where they are clear."""
    golden, wanted = FILE[f"{name}/logits"], FILE["vocab_ids"]
    error = np.linalg.norm(logits[:, wanted] - golden) / np.linalg.norm(golden)
    assert error < 1e-4, f"{name} in chunks of {chunk}: relative error {error:.1e}"
    top_ids, top = FILE[f"{name}/top_ids"], FILE[f"{name}/top_logits"]
    assert np.abs(np.take_along_axis(logits, top_ids, 1) - top).max() < LOGIT_NOISE
    clear = top[:, 0] - top[:, 1] > LOGIT_NOISE
    assert (logits.argmax(1) == top_ids[:, 0])[clear].all()
    assert clear.mean() > 0.9


@pytest.fixture(scope="module")
def driver(model, teacher_forcing):
    """Steps of up to 512 rows, so that the 2,000 tokens of the longest prompt are several chunks in any case."""
    return teacher_forcing(model, row_counts=(16, 128, 512), max_len=2032, page_size=16, num_seqs=8)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "in chunks"])
def test_logits(driver, forced, is_whole):
    """Side by side in hybrid steps: whole, with their continuation at once; or in chunks that end anywhere in a page,
    the longest among them in larger ones, and then token by token beside the others' chunks."""
    names = SHORT[:6] if is_whole else [*SHORT[6:], "ledger"]
    chunks = {name: 512 if is_whole else 385 if name == "ledger" else 25 for name in names}
    lengths = {name: len(FILE[f"{name}/prompt_ids"]) for name in names}
    runs = [
        forced(token_ids=tokens_of(n), prompt_len=p, chunk=min(p, chunks[n]), step=32 if is_whole else 1)
        for n, p in lengths.items()
    ]
    logits = driver.logits(runs, [FILE[f"{name}/positions"] for name in names])
    for name, found in zip(names, logits, strict=True):
        check(name, chunks[name], found)


# ------------------------------------------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def make(model, checkpoint):
    """Engines that share their programs: shapes of 32 and 128 rows."""
    compiled: dict = {}

    def make(budget: int, *, num_pages: int = 160, lookahead: int = 0) -> Engine:
        engine = Engine(
            model,
            checkpoint.tokenizer(),
            scheduler=sj.Sarathi(token_budget=budget, max_num_seqs=len(SHORT)),
            cache=CacheConfig(num_pages=num_pages),
            max_model_len=384,
            eos_token_ids=checkpoint.eos_token_ids,
            lookahead=lookahead,
        )
        rows = tuple(n for n in (32, 128) if n <= budget)
        object.__setattr__(engine.runner.shapes, "num_tokens", rows)
        engine.runner._compiled = compiled
        return engine

    return make


def check_continuation(name: str, output: sj.RequestOutput) -> None:
    """Equal tokens up to the first one whose lead is within the noise."""
    golden, gap = FILE[f"{name}/continuation"].tolist(), FILE[f"{name}/gap"]
    for i, (ours, theirs) in enumerate(zip(output.token_ids, golden, strict=True)):
        if ours != theirs:
            assert gap[i] < LOGIT_NOISE, (
                f"{name}: token {i} is {ours}, transformers has {theirs} with a lead of {gap[i]:.4f}"
            )
            return


def test_greedy_continuations_together_in_chunks_and_through_preemption(make):
    """Eleven prompts beside each other, the longest in chunks, in a pool that does not hold them all; the text is the
    tokenizer's of the golden ids."""
    engine = make(128, lookahead=1)
    taken = engine.pool.allocate(engine.pool.num_pages - 64)
    check_integrity = engine.check_integrity
    engine.check_integrity = lambda: None  # the pages taken above belong to no sequence
    final = {}
    try:
        for name in SHORT:
            params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
            engine.add_request(name, prompt_token_ids=FILE[f"{name}/prompt_ids"].tolist(), params=params)
        while engine.has_unfinished():
            final.update({o.request_id: o for o in engine.step()})
    finally:
        engine.pool.free(taken)
    check_integrity()
    assert sum(o.metrics.num_preemptions for o in final.values()) > 0, "the pool is not small enough"
    for name in SHORT:
        check_continuation(name, final[name])
        if final[name].token_ids == FILE[f"{name}/continuation"].tolist():
            assert final[name].text == engine.tokenizer.decode(final[name].token_ids)
    assert sum(final[n].token_ids == FILE[f"{n}/continuation"].tolist() for n in SHORT) >= len(SHORT) - 1


@pytest.mark.parametrize("name", ["letter", "code", "two_tokens"])
def test_prompt_logprobs_are_those_of_transformers(make, name):
    engine = make(128)
    ids = FILE[f"{name}/prompt_ids"].tolist()
    engine.add_request(
        "x", prompt_token_ids=ids, params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    )
    while engine.has_unfinished():
        for output in engine.step():
            first, *rest = output.prompt_logprobs
    assert first is None
    ours = [entry[token].logprob for token, entry in zip(ids[1:], rest, strict=True)]
    np.testing.assert_allclose(ours, FILE[f"{name}/prompt_logprobs"], atol=1e-3)


def test_text_in_text_out(make):
    """The default model says the obvious through prompt strings and its chat template."""
    engine = make(32)
    engine.add_request("plain", "The capital of France is", params=SamplingParams(temperature=0.0, max_tokens=6))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = engine.tokenizer.encode_chat(messages)
    engine.add_request("chat", prompt_token_ids=chat, params=SamplingParams(temperature=0.0, max_tokens=24))
    final = {}
    while engine.has_unfinished():
        final.update({o.request_id: o for o in engine.step()})
    assert "Paris" in final["plain"].text
    assert "Paris" in final["chat"].text
    assert final["chat"].finish_reason == "stop"
    assert "<|im_end|>" not in final["chat"].text
