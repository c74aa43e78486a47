"""The engine's promises to a caller: outputs, ends, stop conditions, times, aborts. Mostly against a scripted model."""

from __future__ import annotations

import numpy as np
import pytest

from sarathi_jax.request import SamplingParams

PROMPT = [10, 20, 30]


def ids(text: str) -> list[int]:
    return list(text.encode())


def ask(engine, name="r", prompt=PROMPT, **params):
    engine.add_request(name, prompt_token_ids=prompt, params=SamplingParams(**params))


# ------------------------------------------------------------------------------------------------- events and ends


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_event_for_every_token_and_none_before_the_first(scripted, drain, lookahead):
    """A prompt of five chunks is silent for five steps (C09); each later step gives one token."""
    engine = scripted(ids("abcdefgh"), budget=16, lookahead=lookahead)
    ask(engine, prompt=list(range(75)), max_tokens=8)
    log = drain(engine)
    events = log.events["r"]
    assert [len(e.token_ids) for e in events] == list(range(1, 9))
    assert [e.delta for e in events] == list("abcdefgh")
    assert [e.finish_reason for e in events] == [None] * 7 + ["length"]
    assert log.num_steps == 5 + 7 + lookahead


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("prompt_len", [1, 7, 8, 16, 17, 32, 50])
def test_one_token(make_engine, drain, budget, prompt_len):
    """max_tokens=1 gives the token after the whole prompt, not after its first chunk (C10, C04)."""
    prompt = np.random.default_rng(prompt_len).integers(0, 256, prompt_len).tolist()
    engine = make_engine(budget=budget)
    ask(engine, "one", prompt, temperature=0.0, max_tokens=1)
    log = drain(engine, max_steps=prompt_len // budget + 4)
    ask(engine, "five", prompt, temperature=0.0, max_tokens=5)
    five = drain(engine).final["five"]
    assert log.final["one"].token_ids == five.token_ids[:1]
    assert log.final["one"].finish_reason == five.finish_reason == "length"
    assert len(log.events["one"]) == 1


def test_every_way_to_end(scripted, drain):
    """Exactly one reason each, and what stopped it (T11). EOS, a stop id and a stop string of the same script."""
    engine = scripted([*ids("ab"), 256, *ids("cdef")], eos_token_ids=(256,))
    ask(engine, "eos", max_tokens=9)
    ask(engine, "length", max_tokens=2)
    ask(engine, "id", max_tokens=9, stop_token_ids=[ord("b")])
    ask(engine, "string", max_tokens=9, stop="cd", ignore_eos=True)
    ask(engine, "ignored", max_tokens=6, ignore_eos=True)
    ask(engine, "first", max_tokens=9, stop=["a"])
    final = drain(engine).final
    ends = {name: (o.text, o.finish_reason, o.stop_reason, len(o.token_ids)) for name, o in final.items()}
    assert ends == {
        "eos": ("ab", "stop", None, 3),
        "length": ("ab", "length", None, 2),
        "id": ("a", "stop", ord("b"), 2),
        "string": ("ab", "stop", "cd", 5),
        "ignored": ("abcde", "length", None, 6),
        "first": ("", "stop", "a", 1),
    }


def test_ignore_eos_holds_for_every_eos_id_and_spares_own_stop_ids(scripted, drain):
    """Two EOS ids (P13)."""
    engine = scripted([256, 257, 65, 66, 67], eos_token_ids=(256, 257))
    ask(engine, "ignore", max_tokens=10, ignore_eos=True)
    ask(engine, "own", max_tokens=10, ignore_eos=True, stop_token_ids=[257])
    ask(engine, "second", max_tokens=10, prompt=[1])
    final = drain(engine).final
    assert len(final["ignore"].token_ids) == 10
    assert (final["own"].token_ids, final["own"].stop_reason) == ([256, 257], 257)
    assert final["second"].token_ids == [256]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["ha be", "pha b", "beta", "b", " ", "alpha beta"])
def test_a_stop_string_over_token_borders(scripted, drain, stop, include):
    """One byte a token, so every border is inside the string; the text ends before (or after) it (P14)."""
    engine = scripted(ids("alpha beta gamma"))
    ask(engine, max_tokens=16, stop=[stop], include_stop_str_in_output=include)
    output = drain(engine).final["r"]
    at = "alpha beta gamma".index(stop)
    assert output.text == "alpha beta gamma"[: at + len(stop) * include]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) == at + len(stop)


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(scripted, drain):
    engine = scripted(ids("abcabcab"))
    ask(engine, max_tokens=8, stop=["abcd"])
    output = drain(engine).final["r"]
    assert (output.text, output.finish_reason) == ("abcabcab", "length")


def test_a_stop_string_in_the_prompt_does_not_stop(scripted, drain):
    engine = scripted(ids("xyz"))
    engine.add_request("r", "say xyz", params=SamplingParams(max_tokens=2, stop=["y xy"]))
    assert drain(engine).final["r"].text == "xy"


def test_a_character_over_several_tokens(scripted, drain):
    """No event shows half of it (T01); a tail that never becomes one is shown once (T07)."""
    text = "é🌍 ok"
    engine = scripted([*ids(text), 0xF0, 0x9F])
    ask(engine, max_tokens=len(ids(text)))
    ask(engine, "cut", max_tokens=len(ids(text)) + 2)
    log = drain(engine)
    assert log.final["r"].text == text
    assert all("\ufffd" not in event.text for event in log.events["r"])
    assert log.final["cut"].text == text + "\ufffd"


def test_ids_the_tokenizer_does_not_know_are_empty_text(scripted, drain):
    """A model's vocabulary is padded beyond its tokenizer's (T05)."""
    engine = scripted([97, 263, 98])
    ask(engine, max_tokens=3)
    assert drain(engine).final["r"].text == "ab"


def test_special_tokens_in_the_text_on_demand(scripted, drain):
    engine = scripted([97, 257, 98])
    ask(engine, "skip", max_tokens=3)
    ask(engine, "show", max_tokens=3, skip_special_tokens=False)
    final = drain(engine).final
    assert (final["skip"].text, final["show"].text) == ("ab", "a<|mark|>b")


def test_an_engine_without_a_tokenizer_gives_ids_only(scripted, drain):
    engine = scripted(ids("abc"), tokenizer=None, eos_token_ids=(ord("c"),))
    ask(engine, max_tokens=9)
    output = drain(engine).final["r"]
    assert (output.text, output.delta, output.token_ids, output.finish_reason) == ("", "", ids("abc"), "stop")


def test_generations_of_different_lengths_run_to_their_own_ends(scripted, drain):
    """n=3: each ends by itself; the request with the last (P07)."""
    engine = scripted(
        lambda seq, position: 256 if position - seq.prompt_len > 2 * seq.index else 97, eos_token_ids=(256,)
    )
    ask(engine, n=3, max_tokens=9)
    log = drain(engine)
    assert [c.text for c in log.final["r"].outputs] == ["a", "aaa", "aaaaa"]
    assert [c.index for c in log.final["r"].outputs] == [0, 1, 2]
    assert not any(event.finished for event in log.events["r"][:-1])


def test_the_models_end_bounds_the_output(scripted, drain):
    """max_tokens None, or more than there is room for: prompt and output end at max_model_len (S19)."""
    engine = scripted(ids("ab"), max_model_len=32)
    ask(engine, "none", list(range(20)), max_tokens=None)
    ask(engine, "many", list(range(20)), max_tokens=500)
    ask(engine, "longest", list(range(31)), max_tokens=7)
    final = drain(engine).final
    assert {name: len(o.token_ids) for name, o in final.items()} == {"none": 12, "many": 12, "longest": 1}
    assert {o.finish_reason for o in final.values()} == {"length"}


def test_a_pool_smaller_than_the_model_bounds_the_default_length(scripted, drain):
    """Four pages of 8 hold 32 tokens; the last one needs no page."""
    engine = scripted(ids("ab"), num_pages=4)
    ask(engine, "none", list(range(20)), max_tokens=None)
    assert len(drain(engine, max_steps=60).final["none"].token_ids) == 13


# ------------------------------------------------------------------------------------------------------------ times


def test_times_are_exact(scripted, drain, clock):
    """First token at 1 s, then nine at 10 ms: TTFT 1 s and nine gaps of 10 ms (B01)."""
    waits = iter([1.0, *[0.01] * 9])

    def on_read():
        clock.now += next(waits)

    engine = scripted(ids("abcdefghij"), on_read=on_read, clock=clock)
    clock.now = 0.0
    ask(engine, max_tokens=10)
    metrics = drain(engine).final["r"].metrics
    assert metrics.ttft_s == 1.0
    assert metrics.tbts_s == pytest.approx([0.01] * 9, abs=1e-12)
    assert metrics.e2e_s == pytest.approx(1.09)
    assert (metrics.arrival_s, metrics.scheduling_delay_s, metrics.num_preemptions) == (0.0, 0.0, 0)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_first_token_is_stamped_after_the_last_chunk(scripted, drain, clock, lookahead):
    """Five chunks of a second each; TTFT from the arrival given, not from when it was added (C09)."""

    def on_read():
        clock.now += 1.0

    engine = scripted(ids("abc"), budget=16, on_read=on_read, clock=clock, lookahead=lookahead)
    engine.add_request(
        "r", prompt_token_ids=list(range(75)), params=SamplingParams(max_tokens=3), arrival_time=clock.now - 7
    )
    metrics = drain(engine).final["r"].metrics
    assert metrics.ttft_s == 12.0
    assert metrics.scheduling_delay_s == 7.0
    assert metrics.tbts_s == [1.0, 1.0]


def test_a_request_waits_for_a_slot(scripted, drain, clock):
    def on_read():
        clock.now += 1.0

    engine = scripted(ids("abcd"), max_num_seqs=1, on_read=on_read, clock=clock)
    ask(engine, "first", max_tokens=4)
    ask(engine, "second", max_tokens=2)
    final = drain(engine).final
    assert final["first"].metrics.scheduling_delay_s == 0.0
    assert final["second"].metrics.scheduling_delay_s == 4.0
    assert final["second"].metrics.ttft_s == 5.0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_preemption_is_counted_and_leaves_times_alone(scripted, drain, clock, lookahead):
    """A recomputed prompt gives no token anew: the first token's time stands, nothing is streamed twice (S05)."""

    def on_read():
        clock.now += 1.0

    engine = scripted(num_pages=12, budget=16, on_read=on_read, clock=clock, lookahead=lookahead)
    start = clock.now
    for i in range(4):
        ask(engine, f"r{i}", list(range(i, i + 10)), max_tokens=40)
    log = drain(engine)
    roomy = scripted()
    for i in range(4):
        ask(roomy, f"r{i}", list(range(i, i + 10)), max_tokens=40)
    assert log.token_ids() == drain(roomy).token_ids()
    assert log.num_preempted == sum(o.metrics.num_preemptions for o in log.final.values()) > 0
    for output in log.final.values():
        metrics = output.metrics
        assert metrics.ttft_s <= 4.0 + lookahead
        assert metrics.first_scheduled_s <= start + 3.0
        assert len(metrics.tbts_s) == 39
        assert metrics.token_s == sorted(metrics.token_s)
    waited = [o for o in log.final.values() if o.metrics.num_preemptions]
    assert all(max(o.metrics.tbts_s) > 1.0 for o in waited), "the wait shows between two tokens"


def test_step_statistics_add_up(scripted):
    engine = scripted(ids("abcdef"), budget=16)
    assert engine.last_step is None
    ask(engine, "a", list(range(20)), max_tokens=3)
    ask(engine, "b", list(range(8)), max_tokens=3)
    seen = []
    while engine.has_unfinished():
        engine.step()
        stats = engine.last_step
        seen.append((stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_seqs, stats.num_pages_held))
        assert stats.wall_s >= stats.host_s >= 0
        assert 0.0 <= stats.padding_share < 1.0
    assert seen == [(16, 0, 1, 2), (12, 0, 2, 4), (0, 2, 2, 5), (0, 2, 2, 5)]


# ----------------------------------------------------------------------------------------------------------- aborts


def reference_run(scripted, drain, names, **options):
    engine = scripted(**options)
    for name in names:
        ask(engine, name, [ord(c) for c in name] * 9, max_tokens=12)
    return drain(engine).token_ids()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("num_pages", [192, 12])
def test_an_abort_at_every_moment_harms_nobody_else(scripted, drain, num_pages, lookahead):
    """Waiting, mid-chunk, decoding, preempted, or as it ends, with a step in flight too (S16); twice is once."""
    names = [f"r{i}" for i in range(5)]
    options = {"budget": 16, "num_pages": num_pages, "lookahead": lookahead, "max_num_seqs": 4}
    alone = reference_run(scripted, drain, names)
    moments = set()
    for victim in names:
        for at in range(60):
            engine = scripted(**options)
            for name in names:
                ask(engine, name, [ord(c) for c in name] * 9, max_tokens=12)
            aborted = []

            def before_step(i, engine=engine, victim=victim, at=at, aborted=aborted):
                if i != at:
                    return
                live = engine._live.get(victim)
                if live:
                    seq = live.generations[0].seq
                    state = "preempted" if seq.num_preemptions and seq.slot is None else seq.status.value
                    moments.add((state, bool(0 < seq.num_computed < seq.prompt_len), bool(seq.num_pending)))
                held = engine.pool.num_held
                owned = len(live.generations[0].seq.page_ids) if live else 0
                aborted.append(engine.abort(victim))
                assert aborted[0] == (live is not None)
                assert engine.pool.num_held == held - owned, "its pages are free at once"
                assert not engine.abort(victim)
                engine.check_integrity()

            log = drain(engine, before_step=before_step)
            rest = {name: tokens for name, tokens in log.token_ids().items() if name != victim}
            assert rest == {name: alone[name] for name in names if name != victim}
            if not aborted:
                break  # it was over by then
    states = {state for state, _, _ in moments}
    assert states == {"waiting", "running"} | ({"preempted"} if num_pages == 12 else set())
    assert any(mid_chunk for _, mid_chunk, _ in moments)
    assert any(pending for _, _, pending in moments) == bool(lookahead)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_abort_with_the_model_leaves_the_others_tokens(make_engine, drain, lookahead):
    """The same on the device, where pages and slots of the aborted one are used again while its step still runs."""
    names = [f"r{i}" for i in range(6)]
    prompt = {name: [7 * i + 1, *range(20 + 3 * i)] for i, name in enumerate(names)}
    params = {"temperature": 1.0, "seed": 4, "max_tokens": 10, "repetition_penalty": 1.1}

    def run(victim=None, at=None):
        engine = make_engine(budget=16, lookahead=lookahead, num_pages=20, max_num_seqs=16)
        for name in names:
            ask(engine, name, prompt[name], **params)
        return drain(engine, before_step=lambda i: engine.abort(victim) if i == at else None).token_ids()

    alone = run()
    for at in range(0, 24, 3):
        victim = names[at % 5]
        assert {k: v for k, v in run(victim, at).items() if k != victim} == {
            k: v for k, v in alone.items() if k != victim
        }


def test_abort_of_a_name_that_is_not_there(scripted, assert_idle):
    engine = scripted()
    assert not engine.abort("nobody")
    assert_idle(engine)


def test_an_aborted_name_can_be_used_again_at_once(scripted, drain):
    """With the old one's step still in flight, its token must not reach the new request."""
    engine = scripted(ids("abcdef"), lookahead=1)
    ask(engine, "x", [1, 2, 3], max_tokens=6)
    for _ in range(3):
        engine.step()
    assert engine.abort("x")
    ask(engine, "x", [4] * 20, max_tokens=2)
    log = drain(engine)
    assert log.final["x"].text == "ab"


def test_one_of_many_samples_cannot_outlive_its_request(scripted, drain, assert_idle):
    engine = scripted(num_pages=20)
    ask(engine, n=4, max_tokens=30)
    for _ in range(5):
        engine.step()
    assert engine.abort("r")
    assert_idle(engine)
    assert engine.step() == []


def test_a_stop_string_before_min_tokens_does_not_stop(scripted, drain):
    engine = scripted(ids("abcabcabc"))
    ask(engine, max_tokens=9, min_tokens=5, stop="bc")
    output = drain(engine).final["r"]
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("abca", "bc", 6)
