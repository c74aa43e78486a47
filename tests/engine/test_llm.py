"""LLM: a folder on disk to texts. Order, one bad prompt among good ones, interrupts, streams, chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import sarathi_jax as sj

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny" / "llama_default"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The tiny model whose tokens are known, with a tokenizer of its own: 95 printable characters and an end."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(GOLDEN, path)
    backend = Backend(models.BPE({**{c: i for i, c in enumerate(["Ġ", *map(chr, range(33, 127))])}, "<|end|>": 95}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(folder) -> sj.LLM:
    return sj.LLM(
        folder,
        scheduler=sj.Sarathi(token_budget=32, max_num_seqs=8),
        cache=sj.CacheConfig(num_pages=40),
        dtype="float32",
        max_model_len=320,
        compile_cache=False,
        progress=False,
    )


@pytest.fixture(autouse=True)
def nothing_stays_behind(llm, assert_idle):
    yield
    assert_idle(llm.engine)
    llm.engine.check_integrity()


def greedy(max_tokens: int = 8, **options) -> sj.SamplingParams:
    return sj.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def test_a_folder_generates_what_transformers_does(llm):
    golden = np.load(GOLDEN / "golden.npz")
    (output,) = llm.generate({"prompt_token_ids": golden["prompt_ids"]}, greedy(16))
    assert output.token_ids == golden["greedy_ids"].tolist()
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_outputs_stand_in_the_order_of_the_prompts(llm):
    """Though they end in another one; texts and ids may be mixed, and parameters given one each."""
    prompts = ["Hello there", {"prompt": "abc"}, {"prompt_token_ids": [1, 2, 3]}, "x" * 100]
    params = [greedy(9), greedy(1), greedy(5), greedy(2)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == ["Hello there", "abc", None, "x" * 100]
    assert [len(o.token_ids) for o in outputs] == [9, 1, 5, 2]
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert llm.generate(prompt, param)[0].token_ids == output.token_ids


def test_one_prompt_needs_no_list_and_no_prompt_is_no_output(llm):
    assert len(llm.generate("abc", greedy(2))) == 1
    assert llm.generate([], greedy()) == []
    assert len(llm.generate("abc")[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "prompt 2: the prompt is empty"),
        ({"prompt_token_ids": [96]}, r"prompt 2: prompt_token_ids has 96; .* \[0, 96\)"),
        ("x" * 500, "prompt 2: .*too long for the model"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt 2: .*must be a string or a mapping"),
        ({"text": "a"}, "prompt 2: .*must be a string or a mapping"),
        (7, "prompt 2: 7 must be a string"),
        ({"prompt_token_ids": None}, "prompt 2: "),
    ],
)
def test_one_bad_prompt_is_named_and_nothing_runs(llm, monkeypatch, bad, message):
    ran = []
    monkeypatch.setattr(llm.engine.runner, "execute", lambda plan: ran.append(plan))
    with pytest.raises(ValueError, match=message):
        llm.generate(["good", "good too", bad, "another"], greedy())
    assert not ran
    monkeypatch.undo()
    assert len(llm.generate("good", greedy(3))[0].token_ids) == 3


def test_parameters_one_for_all_or_one_each(llm):
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()])
    with pytest.raises(ValueError, match=r"prompt 1: params="):
        llm.generate(["a", "b"], [greedy(), {"max_tokens": 3}])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_an_engine_that_works(llm, monkeypatch, error):
    """Ctrl-C in the middle: no request, page or slot stays taken."""
    step, count = llm.engine.step, iter(range(100))

    def interrupted():
        if next(count) == 4:
            raise error("stop")
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(error, match="stop"):
        llm.generate(["a" * 50, "b" * 20, "c"], greedy(20))
    monkeypatch.undo()
    assert not llm.engine.has_unfinished()
    assert llm.engine.pool.num_held == 0
    assert len(llm.generate("abc", greedy(3))[0].token_ids) == 3


def test_a_stream_adds_up_to_the_whole(llm):
    outputs = list(llm.stream("Hello there", greedy(7)))
    assert [len(o.token_ids) for o in outputs] == list(range(1, 8))
    assert "".join(o.delta for o in outputs) == outputs[-1].text == llm.generate("Hello there", greedy(7))[0].text


def test_a_stream_left_early_is_aborted(llm):
    stream = llm.stream("Hello there", greedy(50))
    next(stream)
    assert llm.engine.pool.num_held > 0
    stream.close()
    assert llm.engine.pool.num_held == 0


def test_a_stream_goes_on_beside_other_work(llm):
    """A whole generate between two of its tokens, in the same engine."""
    alone = llm.generate("Hello there", greedy(7))[0]
    stream = llm.stream("Hello there", greedy(7))
    first = next(stream)
    assert len(llm.generate("something else", greedy(2))[0].token_ids) == 2
    rest = list(stream)
    assert (rest[-1] if rest else first).token_ids == alone.token_ids


def test_chat_goes_through_the_template(llm):
    """One conversation, or several; the same ids as the rendered text."""
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, greedy(4))
    assert one.token_ids == llm.generate("u:hi;a:", greedy(4))[0].token_ids
    two = llm.chat([messages, [{"role": "user", "content": "bye"}]], greedy(4))
    assert [len(o.token_ids) for o in two] == [4, 4]
    assert two[0].token_ids == one.token_ids


def test_eos_of_the_checkpoint_ends_a_text(llm):
    """config.json says 2; a bias makes it the likeliest."""
    params = sj.SamplingParams(temperature=0.0, max_tokens=5, logit_bias={2: 100.0})
    (output,) = llm.generate("abc", params)
    assert (output.token_ids, output.text, output.finish_reason) == ([2], "", "stop")
    assert llm.engine.eos_token_ids[0] in (2, 95)
    assert 2 in llm.engine.eos_token_ids


def test_outputs_of_the_engine_s_own_user_wait_for_them(llm):
    llm.engine.add_request("mine", prompt_token_ids=[5, 6, 7], params=greedy(3))
    (output,) = llm.generate("Hello", greedy(12))
    assert len(output.token_ids) == 12
    assert llm.engine.has_unfinished()
    outputs = []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
    assert [len(o.token_ids) for o in outputs] == [1, 2, 3]
    assert outputs[-1].finished


def test_a_text_far_too_long_is_refused_before_it_is_tokenised(llm, monkeypatch):
    monkeypatch.setattr(type(llm.tokenizer), "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(ValueError, match=r"10000000 characters, more than max_model_len=320"):
        llm.generate("x" * 10_000_000)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.chat([{"role": "user", "content": "x"}], temperatur=3),
        lambda llm: llm.stream("Hi", bogus=1),
        lambda llm: llm.chat(None),
        lambda llm: llm.chat([]),
        lambda llm: llm.generate(None),
        lambda llm: llm.generate(3),
        lambda llm: llm.stream(None),
    ],
)
def test_a_misspelt_option_or_no_prompt_is_refused(llm, call):
    with pytest.raises(ValueError, match=r"temperatur|bogus|None|3|\[\]"):
        call(llm)


def test_a_model_is_loaded_in_int8_if_wanted(folder):
    options = {"max_model_len": 64, "warm_up": False, "progress": False, "cache": sj.CacheConfig(num_pages=8)}
    plain, rounded = (sj.Engine.load(folder, quantization=q, **options) for q in (None, "int8"))
    kinds = [{leaf.dtype.name for leaf in engine.runner.weights} for engine in (plain, rounded)]
    assert "int8" not in kinds[0]
    assert "int8" in kinds[1]
