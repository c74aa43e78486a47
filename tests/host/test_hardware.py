"""The tables of devices and models: against data sheets, published parameter counts and the paper's table 1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_jax.hardware import DEVICES, Efficiency, Link, find_device
from sarathi_jax.known_models import MODELS, model_config

# Parameters of the published checkpoints, as their model cards and safetensors indices count them.
PUBLISHED = {
    "mistral-7b": 7_241_732_096,
    "yi-34b": 34_388_917_248,
    "yi-34b-200k": 34_388_917_248,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "codellama-34b": 33_743_970_304,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 178_557_088_768,
    "gemma2-9b": 9_241_705_984,
    "mixtral-8x7b": 46_702_792_704,
    "opt-13b": 12_853_473_280 - 2 * 5120,  # its table of positions starts with two rows that nothing uses
    "phi3-mini-4k": 3_821_079_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_its_checkpoint(name):
    """A wrong size, bias, norm or tied head anywhere changes the count: memory plans and random weights rely on it."""
    assert model_config(name).num_params == PUBLISHED[name]


# What no count shows: rotary base (None: learned positions), context, epsilon of the norms, window.
DETAILS = {
    "mistral-7b": (1e4, 32768, 1e-5, 4096),
    "yi-34b": (5e6, 4096, 1e-5, None),
    "yi-34b-200k": (1e7, 200000, 1e-5, None),
    "llama2-7b": (1e4, 4096, 1e-5, None),
    "llama2-70b": (1e4, 4096, 1e-5, None),
    "llama3-8b": (5e5, 8192, 1e-5, None),
    "llama3-70b": (5e5, 8192, 1e-5, None),
    "codellama-34b": (1e6, 16384, 1e-5, None),
    "falcon-7b": (1e4, 2048, 1e-5, None),
    "falcon-40b": (1e4, 2048, 1e-5, None),
    "falcon-180b": (1e4, 2048, 1e-5, None),
    "gemma2-9b": (1e4, 8192, 1e-6, 4096),
    "mixtral-8x7b": (1e6, 32768, 1e-5, None),
    "opt-13b": (None, 2048, 1e-5, None),
    "phi3-mini-4k": (1e4, 4096, 1e-5, 2047),
    "qwen2.5-7b": (1e6, 131072, 1e-6, None),
    "qwen2.5-32b": (1e6, 131072, 1e-5, None),
    "qwen3-8b": (1e6, 40960, 1e-6, None),
    "qwen3-32b": (1e6, 40960, 1e-6, None),
    "qwen3-30b-a3b": (1e6, 40960, 1e-6, None),
    "smollm2-135m": (1e5, 8192, 1e-5, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_count_does_not_show_is_that_of_its_config(name):
    m = model_config(name)
    theta = m.rope_theta if m.positions == "rope" else None
    assert (theta, m.max_position, m.norm_eps, m.sliding_window) == DETAILS[name]


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    [
        ("mistral-7b", 32, 4096, 32, 8, 14336, 32000),
        ("yi-34b-200k", 60, 7168, 56, 8, 20480, 64000),
        ("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        ("falcon-180b", 80, 14848, 232, 8, 59392, 65024),
    ],
)
def test_the_papers_models(name, layers, hidden, heads, kv_heads, ffn, vocab):
    m = model_config(name)
    assert (m.num_layers, m.hidden_size, m.num_heads, m.num_kv_heads) == (layers, hidden, heads, kv_heads)
    assert (m.intermediate_size, m.vocab_size) == (ffn, vocab)
    assert m.num_heads * m.head_dim == m.hidden_size
    assert m.sliding_window == (4096 if name == "mistral-7b" else None)
    assert m.gated_mlp == (m.block == "sequential") == (name != "falcon-180b")


@pytest.mark.parametrize(
    ("name", "tflops", "tbytes", "gib"),
    [
        ("a100", 312, 2.04, 80.0),
        ("a40", 150, 0.70, 44.99),
        ("h100", 989, 3.35, 79.65),
        ("h200", 989, 4.8, 140.40),
        ("tpu-v4", 275, 1.2, 32),
        ("tpu-v5e", 197, 0.819, 16),
        ("tpu-v5p", 459, 2.765, 95),
        ("tpu-v6e", 918, 1.64, 32),
    ],
)
def test_a_device_has_the_peaks_of_its_data_sheet(name, tflops, tbytes, gib):
    device = find_device(name)
    assert device.flops_per_s == pytest.approx(tflops * 1e12)
    assert device.memory_bytes_per_s == pytest.approx(tbytes * 1e12)
    assert device.memory_bytes / 2**30 == pytest.approx(gib, abs=0.01)


def test_every_device_is_listed_under_its_name():
    assert all(device.name == name for name, device in DEVICES.items())


def test_a_group_talks_over_the_slowest_link_it_needs():
    pairs = find_device("a100-pairs")
    rates = [pairs.link(n).bytes_per_s for n in (1, 2, 3, 4, 5, 8)]
    assert rates[0] == rates[1] > rates[2] == rates[3] > rates[4] == rates[5] == pairs.node_link.bytes_per_s


@pytest.mark.parametrize("name", ["a100-pairs", "a40"])
def test_four_devices_in_pairs_talk_as_slowly_as_pcie(name):
    """Tensor parallelism over four of them: the paper's LLaMA2-70B and Falcon-180B."""
    device = find_device(name)
    assert device.link(4).bytes_per_s < 25e9 < device.link(2).bytes_per_s


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"device 'a200' is not known; known: a100, .*h200.*tpu-v6e"):
        find_device("a200")
    with pytest.raises(ValueError, match=r"model 'gpt-5' is not known; known: .*mistral-7b.*yi-34b"):
        model_config("gpt-5")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Efficiency(math=1.2), "math=1.2 is out of range; a share of the peak"),
        (lambda: Efficiency(host_s=-1.0), "host_s=-1.0 is out of range; seconds"),
        (lambda: Link(bytes_per_s=0.0, latency_s=0.0), "bytes_per_s=0.0 is out of range"),
        (lambda: replace(find_device("a100"), tile=(0, 64)), "tile=0 is out of range; a tile is"),
        (lambda: replace(find_device("a100"), links=()), r"links has groups of \[\] devices; there must be one"),
        (lambda: replace(find_device("a100"), num_cores=0), "num_cores=0 must be an integer >= 1"),
        (
            lambda: replace(find_device("a100-pairs"), links=find_device("a100-pairs").links[::-1]),
            r"links has groups of \[4, 2\] devices",
        ),
    ],
)
def test_impossible_devices_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
