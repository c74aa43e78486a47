"""A request that can never run is refused when it is added, names what is wrong, and harms nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax import device
from sarathi_jax.config import CacheConfig, ModelConfig
from sarathi_jax.engine import Engine
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)

BAD_PROMPTS = {
    "empty ids": ({"prompt_token_ids": []}, "prompt is empty"),
    "empty text": ({"prompt": ""}, "prompt is empty"),
    "id beyond the vocabulary": ({"prompt_token_ids": [1, 264]}, r"prompt_token_ids has 264; .* \[0, 264\)"),
    "negative id": ({"prompt_token_ids": [-1]}, "prompt_token_ids has -1"),
    "bool": ({"prompt_token_ids": [True, 1]}, "prompt_token_ids has True"),
    "float": ({"prompt_token_ids": [1.0]}, r"prompt_token_ids has 1\.0"),
    "float array": ({"prompt_token_ids": np.array([1.5, 2.5])}, "prompt_token_ids has"),
    "nested": ({"prompt_token_ids": [[1, 2]]}, "prompt_token_ids has"),
    "text as ids": ({"prompt_token_ids": "12"}, "prompt_token_ids='12' must be a list"),
    "number as ids": ({"prompt_token_ids": 12}, "prompt_token_ids=12 must be a list"),
    "None among ids": ({"prompt_token_ids": [1, None]}, "prompt_token_ids has None"),
    "both forms": ({"prompt": "a", "prompt_token_ids": [1]}, "either prompt"),
    "neither form": ({}, "either prompt"),
    "number as text": ({"prompt": 5}, "text"),
    "bytes as text": ({"prompt": b"abc"}, "text"),
    "lone surrogate": ({"prompt": "a\ud800b"}, "surrogate"),
    "as long as the model": ({"prompt_token_ids": [1] * 96}, r"prompt of 96 tokens.*max_model_len=96"),
    "longer than the model": ({"prompt_token_ids": [1] * 5000}, r"prompt of 5000 tokens.*max_model_len=96"),
    "arrival not a number": ({"prompt_token_ids": [1], "arrival_time": float("nan")}, "arrival_time"),
    "arrival infinite": ({"prompt_token_ids": [1], "arrival_time": float("inf")}, "arrival_time"),
    "arrival as text": ({"prompt_token_ids": [1], "arrival_time": "now"}, "arrival_time='now'"),
    "priority as text": ({"prompt_token_ids": [1], "priority": "high"}, "priority='high'"),
    "params a mapping": ({"prompt_token_ids": [1], "params": {"max_tokens": 3}}, "params=.* must be SamplingParams"),
    "bias beyond the vocabulary": (
        {"prompt_token_ids": [1], "params": SamplingParams(logit_bias={264: 1.0})}, "logit_bias has 264"
    ),
    "stop id beyond the vocabulary": (
        {"prompt_token_ids": [1], "params": SamplingParams(stop_token_ids=[9999])}, "stop_token_ids has 9999"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_request_is_refused_during_traffic_and_changes_nothing(scripted, drain, case):
    options, message = BAD_PROMPTS[case]

    def run(with_bad_one):
        engine = scripted(budget=16, lookahead=1)
        for i in range(3):
            engine.add_request(f"r{i}", prompt_token_ids=[i + 1] * 20, params=SamplingParams(max_tokens=5))

        def before_step(i):
            if with_bad_one and i in (0, 3, 6):
                state = engine.pool.num_free, engine.num_unfinished, engine.scheduler.num_waiting
                with pytest.raises(ValueError, match=message):
                    engine.add_request("bad", **options)
                assert state == (engine.pool.num_free, engine.num_unfinished, engine.scheduler.num_waiting)

        return drain(engine, before_step=before_step).token_ids()

    assert run(True) == run(False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("temperature", float("nan")),
        ("temperature", -1.0),
        ("temperature", float("inf")), ("top_p", float("nan")), ("top_p", 0.0), ("top_p", 2.0), ("top_k", -2),
        ("min_p", float("nan")), ("min_p", 2.0), ("repetition_penalty", 0.0), ("presence_penalty", float("nan")),
        ("n", 0), ("n", 10**9), ("seed", 2**70), ("logprobs", 21), ("prompt_logprobs", -1), ("min_tokens", -1),
        ("stop", 5), ("stop", [""]), ("logit_bias", {"7": 1.0}), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}), ("ignore_eos", 1), ("stop_token_ids", [True]),
    ],
)  # fmt: skip
def test_parameters_out_of_range_name_themselves(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("request_id", ["", None, 5, b"x"])
def test_a_request_id_is_a_name(scripted, request_id):
    with pytest.raises(ValueError, match="request_id"):
        scripted().add_request(request_id, prompt_token_ids=[1])


def test_a_name_in_use_is_refused_and_the_first_goes_on(scripted, drain):
    """Free again once it has ended (R01)."""
    engine = scripted([97, 98, 99])
    engine.add_request("x", prompt_token_ids=[1], params=GREEDY)
    with pytest.raises(ValueError, match="request_id='x' is in use"):
        engine.add_request("x", prompt_token_ids=[2], params=GREEDY)
    assert drain(engine).final["x"].text == "abca"
    engine.add_request("x", prompt_token_ids=[3], params=GREEDY)
    assert drain(engine).final["x"].prompt_token_ids == (3,)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "fits"), [(30, 3, True), (30, 4, False), (32, 1, True), (33, 1, False)]
)
def test_what_outgrows_the_pool_is_refused_with_the_numbers(scripted, drain, prompt_len, max_tokens, fits):
    """Four pages of 8: 32 tokens, and a last one that is never run (S01, S02)."""
    engine = scripted(num_pages=4)
    add = lambda: engine.add_request(
        "x", prompt_token_ids=[1] * prompt_len, params=SamplingParams(max_tokens=max_tokens)
    )
    if fits:
        add()
    else:
        with pytest.raises(
            ValueError, match=rf"prompt of {prompt_len} tokens, max_tokens={max_tokens}.*pool has 4.*num_pages"
        ):
            add()
    engine.add_request("short", prompt_token_ids=[1], params=GREEDY)
    log = drain(engine, max_steps=50)
    assert len(log.final["short"].token_ids) == 4
    assert ("x" in log.final) == fits


def test_every_sample_of_a_refused_request_is_refused(scripted, assert_idle):
    engine = scripted(num_pages=4)
    with pytest.raises(ValueError, match="KV cache"):
        engine.add_request("x", prompt_token_ids=[1] * 40, params=SamplingParams(n=5))
    assert_idle(engine)


def test_stop_strings_and_texts_need_a_tokenizer(scripted):
    engine = scripted(tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer: give prompt_token_ids"):
        engine.add_request("x", "text")
    with pytest.raises(ValueError, match=r"stop=.* needs a tokenizer.*stop_token_ids"):
        engine.add_request("x", prompt_token_ids=[1], params=SamplingParams(stop="a"))


@pytest.mark.parametrize("kind", [tuple, np.array, iter])
def test_ids_may_come_in_any_iterable(scripted, drain, kind):
    engine = scripted([97])
    engine.add_request("x", prompt_token_ids=kind([1, 2, 3]), params=GREEDY)
    assert drain(engine).final["x"].prompt_token_ids == (1, 2, 3)


# -------------------------------------------------------------------------------------------------- engines and devices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, "max_model_len=257 is beyond the model's 256 positions"),
        ({"max_model_len": 0}, "max_model_len=0 must be an integer >= 1"),
        ({"budget": 24}, "token_budget=24 must be a multiple of the matmul tile 16; nearest: 16 or 32"),
        ({"budget": 0}, "token_budget"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"num_pages": 0}, "num_pages"),
        ({"lookahead": -1}, "lookahead"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(new_engine, options, message):
    with pytest.raises(ValueError, match=message):
        new_engine(**options)


def test_a_tokenizer_of_another_model_is_refused(byte_tokenizer):
    config = ModelConfig(
        architecture="llama", vocab_size=200, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_position=64,
    )  # fmt: skip
    model = Decoder(config, {"embed": jnp.zeros((200, 8))})
    with pytest.raises(ValueError, match="tokenizer knows 258 ids and the model embeds 200"):
        Engine(model, byte_tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "sarathi"}, "scheduler='sarathi' must be SchedulerConfig"),
        ({"scheduler": 0}, "scheduler=0 must be SchedulerConfig"),
        ({"cache": {"num_pages": 4}}, "cache=.* must be CacheConfig"),
        ({"max_step_tokens": -4}, "max_step_tokens=-4"),
        ({"eos_token_ids": [10**6]}, r"eos_token_ids has 1000000; .* \[0, 264\)"),
        ({"eos_token_ids": ["a"]}, "eos_token_ids has 'a'"),
    ],
)
def test_an_engine_of_the_wrong_parts_is_refused(tiny_model, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model, None, **{"cache": CacheConfig(num_pages=8), **options})


@pytest.mark.parametrize("dtype", ["float16", "int8", "", "FLOAT32"])
def test_an_unknown_dtype_names_the_known_ones(dtype):
    with pytest.raises(ValueError, match=r"dtype=.*'auto', 'float32', 'bfloat16'"):
        device.resolve_dtype(dtype)


def test_auto_is_the_dtype_that_is_fast_here(monkeypatch):
    assert device.resolve_dtype("float32") == jnp.float32
    assert device.resolve_dtype("bfloat16") == jnp.bfloat16
    for fast, jax_version, expected in [
        (True, "0.12.0", "bfloat16"),
        (True, "0.10.2", "float32"),
        (False, "1.0", "float32"),
    ]:
        monkeypatch.setattr(device, "_cpu_multiplies_bfloat16", lambda fast=fast: fast)
        monkeypatch.setattr(device, "version", lambda _, v=jax_version: v)
        assert device.resolve_dtype("auto") == expected
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    assert device.resolve_dtype("auto") == jnp.bfloat16


def test_pages_follow_the_memory(monkeypatch, tiny_model):
    """A page of 16 tokens here: 2 (k, v) x 2 layers x 2 heads x 16 x 16 floats = 8 KiB."""
    config = tiny_model.config

    def count(free_bytes, **cache):
        monkeypatch.setattr(device, "free_memory_bytes", lambda: free_bytes)
        return device.num_pages(
            config, CacheConfig(**cache), dtype=jnp.dtype(jnp.float32), max_num_seqs=4, max_model_len=100
        )

    page = device.page_bytes(config, 16, jnp.dtype(jnp.float32))
    assert page == 8192
    assert device.page_bytes(config, 16, jnp.dtype(jnp.bfloat16)) == 4096
    assert device.page_bytes(config, 16, jnp.bfloat16) == 4096
    assert count(100 * page) == 8  # a tenth, less the sink, cut to three bits
    assert count(100 * page, memory_fraction=0.2) == 16
    assert count(150 * page) == count(160 * page) == 14, "a little more memory is not another program"
    assert count(10**12) == 4 * 7, "no more than can ever be used"
    with pytest.raises(ValueError, match=r"no room for the KV cache.*memory_fraction"):
        count(10 * page)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_pages_that_are_asked_for_must_fit_the_memory(monkeypatch, tiny_model, platform):
    """Five pages of 8 KiB and the sink need 48 KiB; else the pool is cut short by whoever kills the process."""
    monkeypatch.setattr(device, "platform", lambda: platform)
    count = lambda: device.num_pages(
        tiny_model.config, CacheConfig(num_pages=5), dtype=jnp.float32, max_num_seqs=4, max_model_len=100
    )
    monkeypatch.setattr(device, "free_memory_bytes", lambda: 6 * 8192)
    assert count() == 5
    monkeypatch.setattr(device, "free_memory_bytes", lambda: 6 * 8192 - 1)
    with pytest.raises(ValueError, match=r"num_pages=5 of page_size=16 need 49,152 bytes and 49,151 are free; lower"):
        count()


def test_an_engine_larger_than_the_machine_is_refused(new_engine):
    with pytest.raises(ValueError, match=r"num_pages=1000000000000 of page_size=\d+ need .* are free"):
        new_engine(num_pages=10**12)


_CHAT = """
import builtins, runpy, sys
import sarathi_jax as sj

asked = []

class LLM:
    def __init__(self, *_, **__): pass
    def stream(self, messages, params):
        asked.append([m["content"] for m in messages])
        if len(messages[-1]["content"]) > 5:
            raise ValueError("too long")
        yield type("Output", (), {"delta": "yes", "text": "yes"})

questions = iter(["hi", "far too long", "bye", ""])
builtins.input = lambda _: next(questions)
sj.LLM = LLM
sys.argv = ["chat.py"]
try:
    runpy.run_path(CHAT, run_name="__main__")
except SystemExit:
    print(asked)
"""


def test_a_question_that_is_refused_leaves_the_conversation():
    """It would be sent again with each question that follows, and refuse them all."""
    chat = Path(__file__).parents[2] / "examples" / "chat.py"
    done = subprocess.run(
        [sys.executable, "-c", f"CHAT = {str(chat)!r}\n{_CHAT}"], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == str([["hi"], ["hi", "yes", "far too long"], ["hi", "yes", "bye"]]), done


def test_the_machine_has_memory_and_a_tile():
    assert device.free_memory_bytes() > 2**20
    assert device.default_token_budget() % device.tile() == 0
    assert sj.Sarathi().token_budget is None
