"""Trace files: what they hold is used or reported by line, and files that are none say what is wrong with them."""

import gzip
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_jax.workload_files import BadRow, load_csv, load_mooncake, load_sharegpt

from .test_workload import HEADER, TRACES, lengths_of, needs_traces, times_of


def write(tmp_path, content, name="trace.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_csv_of_lengths_alone(tmp_path):
    path = write(tmp_path, f" {HEADER},id\r\n10,1,0\r\n 20 ,2,1\r\n\r\n")
    workload, report = load_csv(path)
    assert lengths_of(workload) == [(10, 1), (20, 2)]
    assert times_of(workload) == [0.0, 0.0] and workload.requests_per_s is None
    assert (report.num_rows, report.num_used, report.skipped) == (2, 2, ())
    assert load_csv(write(tmp_path, gzip.compress(path.read_bytes()), "trace.csv.gz")).workload == workload
    assert load_csv(write(tmp_path, b"\xef\xbb\xbf" + path.read_bytes())).workload == workload


def test_csv_times_count_from_the_first_row(tmp_path):
    workload, _ = load_csv(write(tmp_path, f"arrived_at,{HEADER}\n100.5,10,1\n100.5,20,2\n104.5,30,3\n"))
    assert times_of(workload) == [0.0, 0.0, 4.0]
    assert workload.requests_per_s == 0.5
    assert times_of(workload.with_rate(1.0)) == [0.0, 0.0, 2.0]
    assert workload.with_rate(0.5) == workload


def test_scale_comes_before_the_limit(tmp_path):
    path = write(tmp_path, f"{HEADER}\n800,9\n")
    assert lengths_of(load_csv(path, scale=1 / 8, max_total_tokens=102).workload) == [(100, 2)]
    with pytest.raises(ValueError, match="102 tokens in all are above max_total_tokens=101"):
        load_csv(path, scale=1 / 8, max_total_tokens=101)


BAD_CSV_ROWS = [
    ("1.0,0,10", "num_prefill_tokens=0"),
    ("1.0,10,0", "num_decode_tokens=0"),
    ("1.0,-1,10", "num_prefill_tokens=-1"),
    ("1.0,5,", "num_decode_tokens=''"),
    ("1.0,1000000000,1", "num_prefill_tokens=1000000000"),
    ("1.0,1e9,1", "num_prefill_tokens='1e9'"),
    ("1.0,10.0,1", "num_prefill_tokens='10.0'"),
    ("1.0,ten,1", "num_prefill_tokens='ten'"),
    ("1.0,1_0,1", "num_prefill_tokens='1_0'"),
    (f"1.0,{'9' * 5000},1", "num_prefill_tokens='999"),
    ("1.0,990,11", "1001 tokens in all are above max_total_tokens=1000"),
    ("0.25,10,1", "arrives at 0.25 s, before the last row used, at 0.5 s"),
    ("nan,10,1", "arrived_at_s=nan"),
    ("inf,10,1", "arrived_at_s=inf"),
    ("-1,10,1", "arrived_at_s=-1.0"),
    (",10,1", "arrived_at=''"),
    ("noon,10,1", "arrived_at='noon'"),
    ("", "is blank"),
    ("  ", "is blank"),
    ("1.0,10", "2 fields but 3 columns"),
    ("1.0,10,1,7", "4 fields but 3 columns"),
    ("1.0," + "9" * 200_000 + ",1", "is not CSV"),
    ("1.0,1\r0,1", "is not CSV"),
    (b"1.0,1\xff,1", "not UTF-8 at byte 5"),
    ("1.0,\x00,1", "num_prefill_tokens='\\x00'"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_CSV_ROWS, ids=[reason for _, reason in BAD_CSV_ROWS])
def test_a_bad_row_is_refused_or_left_out_by_its_line_and_rule(tmp_path, row, reason):
    """A request without input or output passes every check downstream and yields latencies that mean nothing."""
    row = row if isinstance(row, bytes) else row.encode()
    path = write(tmp_path, f"arrived_at,{HEADER}\n0.5,10,1\n".encode() + row + b"\n2.5,30,3\n")
    with pytest.raises(ValueError, match="line 3") as error:
        load_csv(path, max_total_tokens=1000)
    assert reason in str(error.value) and str(path) in str(error.value) and len(str(error.value)) < 500
    workload, report = load_csv(path, max_total_tokens=1000, on_bad_row="skip")
    assert lengths_of(workload) == [(10, 1), (30, 3)] and times_of(workload) == [0.0, 2.0]
    assert (report.num_rows, report.num_used) == (3, 2)
    [bad] = report.skipped
    assert bad.line == 3 and reason in bad.reason
    assert str(report) == f"2 of 3 rows used\nline 3: {bad.reason}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (f"{HEADER}\n", "no usable row"),
        (f"{HEADER}\n0,1\n1,0\n", "no usable row: 0 of 2 rows used"),
        ("num_prefill_tokens,output\n1,1\n", "line 1: 0 columns are named 'num_decode_tokens'"),
        (f"{HEADER},num_decode_tokens\n1,1,1\n", "line 1: 2 columns are named 'num_decode_tokens'"),
        ("10,1\n20,2\n", "line 1: 0 columns are named 'num_prefill_tokens'"),
        (f"\n{HEADER}\n1,1\n", "line 1: is blank"),
        (f"{HEADER}\n1,1\n".encode("utf-16"), "line 1: not UTF-8"),
        (gzip.compress(f"{HEADER}\n1,1\n".encode() * 500)[:-9], "not a whole gzip file"),
        (gzip.compress(f"{HEADER}\n1,1\n".encode())[:-6] + b"\x00" * 6, "not a whole gzip file"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 40, "not a whole gzip file"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_trace_is_refused_even_when_rows_may_be_skipped(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as error:
        load_csv(path, on_bad_row="skip")
    assert str(path) in str(error.value)


def test_bad_arguments_to_a_loader(tmp_path):
    path = write(tmp_path, f"{HEADER}\n1,1\n")
    bad = [
        {"scale": 0},
        {"scale": math.nan},
        {"max_total_tokens": 1},
        {"max_total_tokens": 8.0},
        {"on_bad_row": "clip"},
    ]
    for kwargs in bad:
        with pytest.raises(ValueError, match=f"^{next(iter(kwargs))}="):
            load_csv(path, **kwargs)
    with pytest.raises(FileNotFoundError):
        load_csv(tmp_path / "none.csv")


@given(st.binary(max_size=200))
def test_no_bytes_crash_a_loader(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    for data in (content, HEADER.encode() + b"\n" + content, b"[" + content, b'{"timestamp":' + content):
        path = write(folder, data, "anything")
        for load in (load_csv, load_mooncake, lambda path, **kwargs: load_sharegpt(path, Words(), **kwargs)):
            message = ""
            try:
                workload, report = load(path, on_bad_row="skip")
                assert report.num_used == len(workload) >= 1
            except ValueError as error:
                message = str(error)
            assert not message or str(path) in message


@given(st.lists(st.tuples(st.integers(-2, 40), st.integers(-2, 40)), min_size=1, max_size=30))
def test_rows_are_used_or_reported_and_never_lost(tmp_path_factory, rows):
    path = write(tmp_path_factory.getbasetemp(), "\n".join([HEADER, *(f"{p},{d}" for p, d in rows)]))
    good = [(p, d) for p, d in rows if p >= 1 and d >= 1 and p + d <= 60]
    bad = [line for line, (p, d) in enumerate(rows, 2) if (p, d) not in good]
    if not good:
        with pytest.raises(ValueError, match="no usable row"):
            load_csv(path, max_total_tokens=60, on_bad_row="skip")
        return
    workload, report = load_csv(path, max_total_tokens=60, on_bad_row="skip")
    assert lengths_of(workload) == good
    assert [row.line for row in report.skipped] == bad
    assert (report.num_rows, report.num_used) == (len(rows), len(good))


def mooncake(**change):
    row = {"timestamp": 2000, "input_length": 600, "output_length": 3, "hash_ids": [0, 1], **change}
    return json.dumps({key: value for key, value in row.items() if value is not ...})


def test_mooncake_rows(tmp_path):
    path = write(tmp_path, "\n".join([mooncake(), mooncake(timestamp=2500, hash_ids=...), ""]), "trace.jsonl")
    workload, report = load_mooncake(path, scale=0.5)
    assert lengths_of(workload) == [(300, 2), (300, 2)] and times_of(workload) == [0.0, 0.5]
    assert [item.hash_ids for item in workload] == [(0, 1), None]
    assert (workload.requests_per_s, workload.hash_block_len, report.num_used) == (2.0, 256, 2)
    assert len(workload.token_ids(0, vocab_size=99, seed=0)) == 300


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (mooncake(timestamp=1999), "before the last row used"),
        (mooncake(timestamp=-1), "timestamp=-1"),
        (mooncake(timestamp=math.nan), "timestamp=nan"),
        (mooncake(timestamp="2000"), "timestamp='2000'"),
        (mooncake(timestamp=...), "lacks ['timestamp']"),
        (mooncake(input_length=0, hash_ids=...), "input_length=0"),
        (mooncake(input_length=600.0), "input_length=600.0"),
        (mooncake(input_length=True), "input_length=True"),
        (mooncake(input_length=None), "input_length=None"),
        (mooncake(input_length=10**9), "input_length=1000000000"),
        (mooncake(output_length=0), "output_length=0"),
        (mooncake(output_length=500), "1100 tokens in all"),
        (mooncake(hash_ids=[0]), "hash_ids=[0] must be a list of 2"),
        (mooncake(hash_ids=[0, 1, 2]), "must be a list of 2"),
        (mooncake(hash_ids=[0, "1"]), "hash_ids must be integers"),
        (mooncake(hash_ids=7), "hash_ids=7"),
        ("[1, 2]", "is not a JSON object"),
        ("", "is blank"),
        ('{"timestamp": 2000', "is not JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "is not JSON"),
        ("[" * 100_000, "is JSON nested too deeply"),
    ],
    ids=lambda value: value[:40],
)
def test_bad_mooncake_rows(tmp_path, row, reason):
    path = write(tmp_path, "\n".join([mooncake(), row, mooncake()]), "trace.jsonl")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2: ") as error:
        load_mooncake(path, max_total_tokens=1000)
    assert reason in str(error.value)
    workload, report = load_mooncake(path, max_total_tokens=1000, on_bad_row="skip")
    assert len(workload) == 2
    assert [row.line for row in report.skipped] == [2] and reason in report.skipped[0].reason


class Words:
    """A token a word, behind a BOS."""

    def encode(self, text, /):
        text.encode()  # lone surrogates are no text
        return [1, *(len(word) for word in text.split())]


def turn(speaker, value):
    return {"from": speaker, "value": value}


def test_sharegpt_takes_the_first_exchange(tmp_path):
    conversations = [
        {"id": "a", "conversations": [turn("human", "how are you"), turn("gpt", "well thanks"), turn("human", "x")]},
        {"conversations": [turn("system", "be brief"), turn("user", "hi"), turn("assistant", "hello to you")]},
    ]
    workload, report = load_sharegpt(write(tmp_path, json.dumps(conversations), "chat.json"), Words())
    assert [item.prompt_token_ids for item in workload] == [(1, 3, 3, 3), (1, 2)]
    assert lengths_of(workload) == [(4, 2), (2, 3)], "the prompt has its BOS, an output has none"
    assert report.num_used == 2 and workload.requests_per_s is None
    assert workload.token_ids(0, vocab_size=10, seed=0) == (1, 3, 3, 3)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"conversations": [turn("human", "a"), turn("gpt", "")]}, "num_decode_tokens=0"),
        ({"conversations": [turn("human", "a"), turn("human", "b")]}, "right behind"),
        ({"conversations": [turn("gpt", "a")]}, "right behind"),
        ({"conversations": [turn("gpt", "a"), turn("human", "b")]}, "right behind"),
        ({"conversations": []}, "right behind"),
        ({"conversations": None}, 'a list "conversations"'),
        ({}, 'a list "conversations"'),
        ([], 'a list "conversations"'),
        ({"conversations": [turn("human", None), turn("gpt", "a")]}, 'a text "value"'),
        ({"conversations": [turn("human", "a \ud800"), turn("gpt", "a")]}, "surrogates"),
        ({"conversations": [turn("human", "a " * 20), turn("gpt", "a")]}, "22 tokens in all"),
    ],
)
def test_bad_conversations(tmp_path, entry, reason):
    good = {"conversations": [turn("human", "a"), turn("gpt", "b")]}
    path = write(tmp_path, json.dumps([good, entry, good], indent=0).replace("\n", ""), "chat.json")
    with pytest.raises(ValueError, match=r"chat\.json, line 1: ") as error:
        load_sharegpt(path, Words(), max_total_tokens=20)
    assert reason in str(error.value)
    workload, report = load_sharegpt(path, Words(), max_total_tokens=20, on_bad_row="skip")
    assert len(workload) == 2
    assert len(report.skipped) == 1 and reason in report.skipped[0].reason


def test_bad_conversations_are_named_by_line_and_number(tmp_path):
    good = json.dumps({"conversations": [turn("human", "a"), turn("gpt", "b")]})
    path = write(tmp_path, f"[\n{good},\n{good}\n,\n\n {{}}, {{}},\n{good}]\n\n", "chat.json")
    _, report = load_sharegpt(path, Words(), on_bad_row="skip")
    reason = 'must be an object with a list "conversations"'
    assert report.skipped == (
        BadRow(line=6, reason=f"conversation 3: {reason}"), BadRow(line=6, reason=f"conversation 4: {reason}"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("[]", "no usable row"),
        ("{}", "must hold a JSON list"),
        ('[\n{"conversations": [', "line 2: is not JSON"),
        ("[\n{}\n", "line 3: ',' or '\\]' expected; is the file cut off"),
        ("[\n{},\n]", "line 3: is not JSON"),
        ("[{}]\n[{}]", "more behind the end"),
        ("[" * 100_000, "nested too deeply"),
        (b'[\n\n"\xff"]', "line 3: not UTF-8"),
    ],
)
def test_files_that_hold_no_conversations(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        load_sharegpt(write(tmp_path, content, "chat.json"), Words(), on_bad_row="skip")


@needs_traces
@pytest.mark.parametrize(
    ("load", "name", "num_rows", "requests_per_s", "gap_cv"),
    [
        (load_csv, "sharegpt_8k.csv", 30731, None, None),
        (load_csv, "azure_code_2023.csv", 8819, 2.57, 13.2),
        (load_csv, "azure_conv_2023.csv", 19366, 5.53, 1.09),
        (load_mooncake, "mooncake_synthetic.jsonl.gz", 3993, 3.91, 1.01),
    ],
)
def test_public_traces_load_whole(load, name, num_rows, requests_per_s, gap_cv):
    workload, report = load(TRACES / name)
    statistics = workload.statistics()
    assert (report.num_rows, report.num_used, len(workload)) == (num_rows, num_rows, num_rows)
    for measured, expected in ((statistics.requests_per_s, requests_per_s), (statistics.gap_cv, gap_cv)):
        assert measured is None if expected is None else measured == pytest.approx(expected, rel=0.005)
