"""Devices that nobody here has: compile-only topologies and meshes of them."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from sarathi_jax.parallel import tensor_mesh

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 85017493504
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Some chips of a kind. `backend`: the attention backend that is made for them."""

    name: str
    platform: str
    topology: str
    num_devices: int
    memory_bytes: int
    backend: str

    def mesh(self) -> Mesh:
        return _mesh(self.platform, self.topology, self.num_devices)

    def at_hand(self):
        """A context in which pools and kernels are made for these chips: they ask the mesh for the kind of device."""
        return jax.sharding.use_abstract_mesh(self.mesh().abstract_mesh)


@functools.cache
def _mesh(platform: str, topology: str, num_devices: int) -> Mesh:
    options = {"target_config": H100, "topology": topology} if platform == "cuda" else {}
    devices = topologies.get_topology_desc(topology, platform=platform, **options).devices
    return tensor_mesh(devices[:num_devices])


def _h100(num_devices: int) -> Target:
    return Target(
        name=f"{num_devices} x H100", platform="cuda", topology=f"1x1x{num_devices}", num_devices=num_devices,
        memory_bytes=85017493504, backend="pallas_gpu",
    )  # fmt: skip


def _tpu(kind: str, topology: str, num_devices: int, memory_gib: int) -> Target:
    return Target(
        name=f"{num_devices} x {kind}", platform="tpu", topology=f"{kind}:{topology}", num_devices=num_devices,
        memory_bytes=memory_gib * 2**30, backend="pallas_tpu",
    )  # fmt: skip


TARGETS = {
    "cuda": [_h100(1), _h100(4)],
    "tpu": [_tpu("v5e", "1x1", 1, 16), _tpu("v5e", "2x4", 8, 16), _tpu("v6e", "1x1", 1, 32), _tpu("v6e", "2x4", 8, 32)],
}
