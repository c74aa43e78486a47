"""The cost model: against sums done by hand on a device without friction, and against measured files of real ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from sarathi_jax.budget import TimeModel
from sarathi_jax.config import ModelConfig
from sarathi_jax.cost_model import CostModel, OneStage, as_stages
from sarathi_jax.hardware import DEVICES, Device, Efficiency, Link, find_device
from sarathi_jax.known_models import MODELS, model_config

PERFECT = Efficiency(
    math=1.0,
    memory=1.0,
    elementwise=1.0,
    chunk_attention=1.0,
    decode_attention=1.0,
    matmul_kernel_s=0.0,
    kernel_s=0.0,
    host_s=0.0,
)
FAST = Link(bytes_per_s=1e15, latency_s=0.0)
IDEAL = Device(
    name="ideal",
    flops_per_s=1e12,
    memory_bytes_per_s=1e10,
    memory_bytes=10**9,
    num_cores=1,
    tile=(1, 1),
    token_tile=1,
    links=((8, FAST),),
    node_link=Link(bytes_per_s=1e6, latency_s=0.1),
    efficiency=PERFECT,
)
"""100 FLOPs a byte; nothing costs but arithmetic and memory."""

SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=500,
    hidden_size=64,
    intermediate_size=160,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=4096,
)


def model_of(model: ModelConfig = SMALL, device: Device = IDEAL, **changes) -> CostModel:
    return CostModel(model=model, device=device, **changes)


def by_hand(m: ModelConfig, decodes: list[int], chunks: list[tuple[int, int]]) -> dict[str, float]:
    """Seconds on IDEAL, written out operator by operator; windows by counting the keys of every query."""
    tokens, seqs = len(decodes) + sum(n for _, n in chunks), len(decodes) + len(chunks)
    d, f, head = m.hidden_size, m.intermediate_size, m.head_dim

    def matmul(rows, inner, columns):
        moved = rows * inner + inner * columns + rows * columns
        return max(2 * rows * inner * columns / 1e12, 2 * moved / 1e10)

    q, kv = m.num_heads * head, m.num_kv_heads * head
    layer = matmul(tokens, d, q + 2 * kv) + matmul(tokens, q, d) + matmul(tokens, d, 2 * f) + matmul(tokens, f, d)
    moved = 2 * (2 * d) + 2 * (3 * d) + 2 * (q + kv) + 3 * f  # norms, sums, rotation, activation
    attention = 0.0
    for window in m.layer_windows:
        seen = lambda position, window=window: min(position + 1, window or position + 1)
        keys = sum(seen(length - 1) for length in decodes)
        attention += max(2 * 2 * kv * keys / 1e10, 4 * q * keys / 1e12)
        for start, n in chunks:
            pairs = sum(seen(position) for position in range(start, start + n))
            first = start + 1 - seen(start)
            attention += max(4 * q * pairs / 1e12, 2 * 2 * kv * (start + n - first) / 1e10)
    return {
        "linear": m.num_layers * layer + matmul(seqs, d, m.vocab_size),
        "attention": attention,
        "communication": 0.0,
        "others": 2 * tokens * (m.num_layers * moved + 2 * d) / 1e10 + 2 * seqs * 2 * d / 1e10,
        "host": 0.0,
    }


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        ([1], []),
        ([50, 400, 100, 101], []),
        ([], [(0, 300)]),
        ([], [(90, 20)]),
        ([], [(700, 64), (0, 7), (99, 1)]),
        ([300] * 40, [(128, 512)]),
    ],
)
def test_an_iteration_is_the_sum_of_its_operators(window, decodes, chunks):
    model = replace(SMALL, sliding_window=window)
    cost, expected = model_of(model), by_hand(model, decodes, chunks)
    assert cost.operators_s(decodes, chunks) == pytest.approx(expected, rel=1e-9)
    assert cost(decodes, chunks) == pytest.approx(sum(expected.values()), rel=1e-9)
    assert cost.features_s(len(decodes), cost.keys(decodes), chunks) == cost.stage_s(decodes, chunks)


def test_layers_with_and_without_a_window_count_each_their_keys():
    mixed = replace(SMALL, sliding_window=100, window_pattern=(True, False))
    decodes, chunks = [500, 20], [(300, 50)]
    expected = by_hand(mixed, decodes, chunks)
    assert model_of(mixed).operators_s(decodes, chunks) == pytest.approx(expected, rel=1e-9)
    assert model_of(mixed).keys(decodes) == (120, 520)


def test_tokens_are_rounded_up_to_whole_tiles():
    """The paper's 256 against 257: past a tile's edge an iteration pays for a whole one."""
    tiled = model_of(device=replace(IDEAL, tile=(128, 32), memory_bytes_per_s=1e14))
    up = [tiled.matmuls_s(tokens)["up"] for tokens in (1, 128, 129, 256, 257)]
    assert up == pytest.approx([up[0], up[0], 2 * up[0], 2 * up[0], 3 * up[0]])
    assert up[0] == pytest.approx(2 * 128 * 64 * 320 / 1e12)


def test_tiles_run_in_waves_over_the_cores():
    """5 tiles on 4 cores take as long as 8, unless splitting them is worth the traffic of the partial sums."""
    device = replace(IDEAL, num_cores=4, tile=(64, 64), memory_bytes_per_s=1e11)
    wave = 2 * 64 * 64 * 64 / (1e12 / 4)
    five, eight = (model_of(replace(SMALL, intermediate_size=f), device).matmuls_s(64)["up"] for f in (160, 256))
    assert five == eight == pytest.approx(2 * wave)
    split = model_of(device=replace(device, memory_bytes_per_s=1e16)).matmuls_s(64)["up"]
    assert split == pytest.approx(10 / 8 * wave, rel=1e-3)


def test_chunks_read_the_keys_of_earlier_chunks_again():
    """N chunks read N (N - 1) / 2 chunks more than one, where reading is what attention waits for."""
    slow = replace(IDEAL, flops_per_s=1e16)
    cost, size, n = model_of(device=slow), 64, 8
    whole = cost.operators_s([], [(0, size * n)])["attention"]
    chunked = sum(cost.operators_s([], [(i * size, size)])["attention"] for i in range(n))
    one_chunk = SMALL.num_layers * size * 2 * 2 * 2 * 16 / 1e10
    assert chunked - whole == pytest.approx(n * (n - 1) / 2 * one_chunk)


@pytest.mark.parametrize("name", DEVICES)
def test_no_iteration_gets_faster_as_its_chunk_grows(name):
    """A time budget bisects over chunk sizes; a dip would hide larger chunks from it."""
    cost = model_of(model_config("mistral-7b"), find_device(name))
    times = [cost([1000] * 16, [(512, tokens)]) for tokens in range(1, 1300, 3)]
    assert all(later >= earlier for earlier, later in pairwise(times))


def test_a_decode_in_a_full_batch_costs_little_more_than_alone():
    cost = model_of(model_config("mistral-7b"), find_device("a100"))
    assert cost([100] * 32, []) < 1.3 * cost([100], [])
    assert cost([100], [(0, 4096)]) > 10 * cost([100], [])


def test_nothing_to_run_takes_no_stage_time():
    cost = model_of(pipeline_parallel=2)
    assert cost.stage_s([], []) == (0.0, 0.0)
    assert cost([], []) == sum(cost.operators_s([], []).values()) == cost.host_s


# Parallelism.


def test_stages_share_the_layers_and_hops_join_them():
    whole, halves = model_of(), model_of(pipeline_parallel=2)
    decodes, chunks = [200] * 3, [(0, 100)]
    first, last = halves.stage_s(decodes, chunks)
    assert first + last == pytest.approx(whole.stage_s(decodes, chunks)[0])
    table = 103 * 2 * 64 * 2 / 1e10
    assert first - table < last, "the head is on the last stage"
    assert halves(decodes, chunks) == pytest.approx(first + last + halves.hop_s(103))


def test_a_pipeline_over_two_nodes_hops_over_the_network():
    near = model_of(pipeline_parallel=2)
    assert near.hop_s(100) == pytest.approx(100 * 64 * 2 / 1e15)
    pairs = replace(IDEAL, links=((4, FAST),))
    far = model_of(device=pairs, tensor_parallel=2, pipeline_parallel=4)
    assert far.hop_s(100) == pytest.approx(0.1 + 100 * 64 * 2 / 1e6)


def test_tensor_parallelism_pays_two_all_reduces_a_layer_and_parallel_blocks_one():
    link = Link(bytes_per_s=1e8, latency_s=1e-3)
    device = replace(IDEAL, links=((8, link),))
    tokens, layers = 10, SMALL.num_layers
    one = 1e-3 + 2 * (1 / 2) * tokens * 64 * 2 / 1e8
    logits = 1e-3 + 1 * 250 * 2 / 1e8
    for block, count in (("sequential", 2), ("parallel", 1)):
        cost = model_of(replace(SMALL, block=block), device, tensor_parallel=2)
        seconds = cost.operators_s([], [(0, tokens)])["communication"]
        assert seconds == pytest.approx((count * layers + 1) * one + logits), block


def test_kv_heads_are_split_or_replicated():
    each = [model_of(tensor_parallel=n).kv_bytes_per_token for n in (1, 2, 4)]
    assert each == [2 * 2 * 16 * 4 * 2, 2 * 1 * 16 * 4 * 2, 2 * 1 * 16 * 4 * 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 3}, r"tensor_parallel=3 must divide num_heads=4 .*sizes that do: 1, 2, 4$"),
        ({"pipeline_parallel": 3}, r"pipeline_parallel=3 must divide num_layers=4; sizes that do: 1, 2, 4$"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be an integer >= 1"),
        ({"device": "a100"}, "device='a100' must be Device"),
    ],
)
def test_impossible_parallelism_is_refused_with_what_would_work(changes, message):
    with pytest.raises(ValueError, match=message):
        model_of(**changes)


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused():
    with pytest.raises(
        ValueError, match=r"divide num_kv_heads=6 or be a multiple of it; sizes that do: 1, 2, 3, 6, 12$"
    ):
        model_of(replace(SMALL, num_heads=12, num_kv_heads=6, intermediate_size=96), tensor_parallel=4)


def test_falcon_180b_runs_on_four_and_eight_devices_only():
    for tp in (4, 8):
        model_of(model_config("falcon-180b"), find_device("a100"), tensor_parallel=tp)
    with pytest.raises(ValueError, match=r"num_heads=232 .*: 1, 2, 4, 8"):
        model_of(model_config("falcon-180b"), find_device("a100"), tensor_parallel=16)


# Experts.


def test_few_tokens_read_few_experts_and_many_read_all():
    dense = replace(SMALL, intermediate_size=32)
    moe = replace(dense, num_experts=8, experts_per_token=2, expert_size=32)
    few, many = model_of(moe).matmuls_s(1), model_of(moe).matmuls_s(64)
    read = lambda experts, tokens: 2 * (experts * 64 * 64 + tokens * 2 * (64 + 64)) / 1e10
    assert few["up"] == pytest.approx(read(2, 1))
    reached = 8 * (1 - (6 / 8) ** 64)
    assert many["up"] == pytest.approx(read(reached, 64), rel=1e-6)
    assert model_of(moe).weight_bytes == 2 * moe.num_params
    assert model_of(moe).weight_read_s < model_of(moe)([1], []) < 2 * model_of(moe).weight_read_s


# Memory and the floor.


@pytest.mark.parametrize("name", MODELS)
def test_on_one_device_the_weights_are_those_of_the_model(name):
    cost = model_of(model_config(name), replace(IDEAL, memory_bytes=10**13))
    assert cost.weight_bytes == 2 * model_config(name).num_params


@pytest.mark.parametrize(
    ("name", "tp", "kib"),
    [("mistral-7b", 1, 128), ("llama2-70b", 1, 320), ("llama2-70b", 8, 40), ("llama2-7b", 1, 512)],
)
def test_bytes_of_a_cached_token(name, tp, kib):
    assert model_of(model_config(name), find_device("a100"), tensor_parallel=tp).kv_bytes_per_token == kib * 1024


def test_what_is_left_of_the_memory_holds_keys_and_values():
    cost = model_of(model_config("mistral-7b"), find_device("a100"))
    tokens = cost.kv_tokens()
    free = 0.9 * 80 * 2**30 - 2 * 7_241_732_096
    assert 0.95 * free < tokens * 128 * 1024 < free
    assert cost.kv_tokens(memory_fraction=0.5) < tokens
    assert cost.kv_tokens(max_step_tokens=16384) < tokens - 4 * 16384 * 4096 * 2 / (128 * 1024)
    assert cost.kv_tokens(max_num_seqs=1024) < tokens


def test_a_model_that_does_not_fit_says_by_how_much():
    """138 GB of weights on an 80 GiB device."""
    cost = model_of(model_config("llama2-70b"), find_device("a100"))
    missing = 2 * 68_976_648_192 / 2**30 - 0.9 * 80
    with pytest.raises(ValueError, match="the model does not fit a100 with tensor_parallel=1") as raised:
        cost.kv_tokens(max_step_tokens=1, max_num_seqs=1)
    said = float(str(raised.value).split("GiB are missing")[0].split()[-1])
    assert said == pytest.approx(missing, abs=0.02)
    model_of(model_config("llama2-70b"), find_device("a100"), tensor_parallel=4).kv_tokens()


def test_no_iteration_undercuts_the_reading_of_the_weights():
    for name, tp, pp in (("mistral-7b", 1, 1), ("yi-34b", 2, 1), ("falcon-180b", 4, 2)):
        cost = model_of(model_config(name), find_device("a100-pairs"), tensor_parallel=tp, pipeline_parallel=pp)
        assert cost.weight_read_s < cost([1], []) < 3 * cost.weight_read_s, name


def test_an_slo_under_the_floor_is_refused_with_the_numbers():
    cost = model_of(model_config("yi-34b"), find_device("a100"), tensor_parallel=2)
    cost.check_slo(0.2)
    with pytest.raises(ValueError, match=r"tbt_slo_s=0.01 is under the floor of 0.0\d+ s, .* 31.\d+ GiB of weights"):
        cost.check_slo(0.01)


# Simulators.


def test_any_iteration_cost_is_one_stage():
    measured = TimeModel(
        shapes=(8,),
        shape_s=(0.5,),
        per_decode_s=0.0,
        per_walked_key_s=0.0,
        per_chunk_s=0.0,
        per_pair_s=0.0,
        per_chunk_key_s=0.0,
    )
    stages = as_stages(measured)
    assert isinstance(stages, OneStage)
    assert (stages.num_stages, stages.host_s, stages.hop_s(5)) == (1, 0.0, 0.0)
    assert stages.stage_s([1], []) == (0.5,)
    cost = model_of()
    assert as_stages(cost) is cost
