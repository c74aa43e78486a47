"""Accelerators: what their data sheets promise, and the share of it that kernels get.

Peaks and memory are public figures (sources at `DEVICES`). `Efficiency` and `Link` are what measurements leave of them:
fitted once per device by `cost_fit` where there are measured files, a stated default elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sarathi_jax.config import check_int, check_number, check_positive

_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a device gets of its way to others: bytes/s that it sends, and the seconds that any message takes."""

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        check_number("bytes_per_s", self.bytes_per_s, 1.0, 1e15, "bytes/s, >= 1")
        check_number("latency_s", self.latency_s, 0.0, 10.0, "seconds, >= 0")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks (0 to 1), and the seconds that no peak explains.

    math: FLOP/s of matmuls in full waves of tiles; memory: bandwidth of matmuls that wait for their weights;
    elementwise: bandwidth of norms, rotations, activations and sums; chunk_attention: FLOP/s of a chunk's attention;
    decode_attention: bandwidth of keys and values in attention; matmul_kernel_s, kernel_s: the own time of a matmul's
    kernel and of any other; host_s: an iteration's time on the host in which no kernel runs.
    """

    math: float = 0.80
    memory: float = 0.80
    elementwise: float = 0.50
    chunk_attention: float = 0.40
    decode_attention: float = 0.75
    matmul_kernel_s: float = 5e-6
    kernel_s: float = 3e-6
    host_s: float = 2e-3

    def __post_init__(self) -> None:
        for name in ("math", "memory", "elementwise", "chunk_attention", "decode_attention"):
            check_number(name, getattr(self, name), 1e-3, 1.0, "a share of the peak: 0.001 <= share <= 1")
        for name in ("matmul_kernel_s", "kernel_s", "host_s"):
            check_number(name, getattr(self, name), 0.0, 10.0, "seconds, >= 0")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator among those of its node.

    Attributes:
      flops_per_s: dense bfloat16.
      memory_bytes: what its driver reports; a framework gets a little less.
      num_cores: what takes matmul tiles side by side: a GPU's SMs; 1 where one unit takes tile after tile.
      tile: (tokens, columns) that a core multiplies at a time: the granularity of matmul times.
      token_tile: tokens that token budgets are multiples of.
      links: (devices, link), smallest first: groups of up to so many devices of a node talk over that link.
      node_link: groups that need more than a node.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    num_cores: int
    tile: tuple[int, int]
    token_tile: int
    links: tuple[tuple[int, Link], ...]
    node_link: Link
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        check_number("flops_per_s", self.flops_per_s, 1e9, 1e18, "FLOP/s, >= 1e9")
        check_number("memory_bytes_per_s", self.memory_bytes_per_s, 1e8, 1e16, "bytes/s, >= 1e8")
        for name in ("memory_bytes", "num_cores", "token_tile"):
            check_positive(name, getattr(self, name))
        for size in self.tile:
            check_int("tile", size, 1, 2**20, "a tile is (tokens, columns), both >= 1")
        sizes = [size for size, _ in self.links]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(
                f"links has groups of {sizes} devices; there must be one, and they must be >= 1 and ascend"
            )

    def link(self, num_devices: int) -> Link:
        """The one that so many devices talk over."""
        return next((link for size, link in self.links if num_devices <= size), self.node_link)


def _tpu(name: str, tflops: float, gbytes: float, gib: int, tile: int, ici_gbytes: float, per_node: int) -> Device:
    """A chip. `ici_gbytes`: GB/s out of it over both links of one torus axis, as a ring uses them; 80 % are assumed."""
    return Device(
        name=name,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=gbytes * 1e9,
        memory_bytes=gib * _GIB,
        num_cores=1,
        tile=(tile, tile),
        token_tile=tile,
        links=((per_node, Link(bytes_per_s=0.8e9 * ici_gbytes, latency_s=5e-6)),),
        node_link=Link(bytes_per_s=5e9, latency_s=50e-6),
    )


_AMPERE = Efficiency(math=0.72, memory=0.773, elementwise=0.447, matmul_kernel_s=5.2e-6, kernel_s=2.2e-6)
"""python -m sarathi_jax.cost_fit operators a100 gemm_a100_llama3_8b.csv"""

_HOPPER = Efficiency(math=0.754, memory=0.892, elementwise=0.556, matmul_kernel_s=5.9e-6, kernel_s=2.5e-6)
"""python -m sarathi_jax.cost_fit operators h100 gemm_h100_llama2_70b.csv"""

OSDI_ARTIFACT = replace(_AMPERE, chunk_attention=0.237, decode_attention=0.0485, host_s=15.8e-3)
"""The artifact of the paper on "a100-pairs". A decode costs it 1 ms, as if its keys were read 15 times; whether that is
its kernel or its host, the files do not say.
python -m sarathi_jax.cost_fit batches a100-pairs yi-34b-200k figure-2_decode.csv figure-2_prefill.csv \\
    --tensor_parallel 2 --context 1022 --skip 256"""

# python -m sarathi_jax.cost_fit links network_a100.csv
_NVSWITCH_A100 = (
    (2, Link(bytes_per_s=171e9, latency_s=45e-6)),
    (4, Link(bytes_per_s=148e9, latency_s=33e-6)),
    (8, Link(bytes_per_s=129e9, latency_s=37e-6)),
)
_PAIR_A100 = (2, Link(bytes_per_s=199e9, latency_s=45e-6))
_PCIE4 = Link(bytes_per_s=23.5e9, latency_s=58e-6)
_ETHERNET_100G = Link(bytes_per_s=5.8e9, latency_s=54e-6)
_INFINIBAND = Link(bytes_per_s=16e9, latency_s=78e-6)

_A100 = Device(
    name="a100",
    flops_per_s=312e12,
    memory_bytes_per_s=2.04e12,
    memory_bytes=81_920 * _MIB,
    num_cores=108,
    tile=(64, 64),
    token_tile=128,
    links=_NVSWITCH_A100,
    node_link=_INFINIBAND,
    efficiency=_AMPERE,
)
_H100 = Device(
    name="h100",
    flops_per_s=989e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=81_559 * _MIB,
    num_cores=132,
    tile=(128, 128),
    token_tile=128,
    links=((8, Link(bytes_per_s=0.5 * 450e9, latency_s=37e-6)),),
    node_link=_INFINIBAND,
    efficiency=_HOPPER,
)

DEVICES: dict[str, Device] = {
    "a100": _A100,
    "a100-pairs": replace(_A100, name="a100-pairs", links=(_PAIR_A100, (4, _PCIE4)), node_link=_ETHERNET_100G),
    "a40": Device(
        name="a40",
        flops_per_s=150e12,
        memory_bytes_per_s=0.70e12,
        memory_bytes=46_068 * _MIB,
        num_cores=84,
        tile=(64, 64),
        token_tile=128,
        links=((2, Link(bytes_per_s=0.65 * 56e9, latency_s=45e-6)), (8, _PCIE4)),
        node_link=_ETHERNET_100G,
        efficiency=_AMPERE,
    ),
    "h100": _H100,
    "h200": replace(_H100, name="h200", memory_bytes_per_s=4.8e12, memory_bytes=143_771 * _MIB),
    "tpu-v4": _tpu("tpu-v4", tflops=275, gbytes=1200, gib=32, tile=128, ici_gbytes=90, per_node=4),
    "tpu-v5e": _tpu("tpu-v5e", tflops=197, gbytes=819, gib=16, tile=128, ici_gbytes=90, per_node=8),
    "tpu-v5p": _tpu("tpu-v5p", tflops=459, gbytes=2765, gib=95, tile=128, ici_gbytes=180, per_node=4),
    "tpu-v6e": _tpu("tpu-v6e", tflops=918, gbytes=1640, gib=32, tile=256, ici_gbytes=180, per_node=8),
}
"""By name. "a100-pairs": the paper's machines, four to a node, NVLink between two, PCIe between pairs.

Peaks of GPUs, dense bfloat16: NVIDIA's data sheets of A100 80GB, A40, H100 SXM and H200 SXM; their memory: what
nvidia-smi reports with ECC. TPUs, by chip: the Cloud TPU documentation's pages on v4, v5e, v5p and v6e.

Fitted: matmuls and elementwise of A100 and H100, links of A100. Assumed: the A100's for A40, the H100's for H200, the
defaults of `Efficiency` for TPUs and, everywhere, for attention and the host, which no file of operators has; the
A100's share of NVLink (65 %) for A40, half the peak for H100 and H200.
"""


def find_device(name: str) -> Device:
    """The device of that name in `DEVICES`; ValueError for any other."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not known; known: {', '.join(DEVICES)}")
    return DEVICES[name]
