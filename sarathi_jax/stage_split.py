"""A model's layers cut into pipeline stages that take equally long."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

from sarathi_jax.config import LayerKind, ModelConfig, check_positive
from sarathi_jax.cost_model import CostModel
from sarathi_jax.hardware import Device, find_device

_DECODES = (1024,) * 64
_CHUNKS = ((1024, 448),)
"""The iteration that stages are balanced for."""


def split_layers(config: ModelConfig, num_stages: int, device: Device | None = None) -> list[range]:
    """The layers of each stage: the slowest takes as little as can be, by the cost model of `device`.

    Embedding and head are counted. Only the proportions matter, so None, an H100, serves anywhere.
    """
    check_positive("num_stages", num_stages)
    num_layers = config.num_layers
    if num_stages > num_layers:
        raise ValueError(f"pipeline={num_stages} is more than num_layers={num_layers}; 1 to {num_layers} work")
    device = find_device("h100") if device is None else device
    times = cache(lambda kind: _times(config, kind, device))
    layers = [times(kind)[0] for kind in config.layer_kinds]
    layers[0] += times(config.layer_kinds[0])[1]
    layers[-1] += times(config.layer_kinds[-1])[2]
    until = [0.0]
    for seconds in layers:
        until.append(until[-1] + seconds)
    # best[n]: the first n layers in as many stages as rounds so far: the slowest's time, the sum of squares, the cuts.
    best = {n: (until[n], until[n] ** 2, (0, n)) for n in range(1, num_layers + 1)}
    for stage in range(2, num_stages + 1):
        best = {
            n: min(
                (max(slowest, until[n] - until[m]), squares + (until[n] - until[m]) ** 2, (*cuts, n))
                for m, (slowest, squares, cuts) in best.items()
                if m < n
            )
            for n in range(stage, num_layers + 1)
        }
    cuts = best[num_layers][2]
    return [range(*cut) for cut in pairwise(cuts)]


def _times(config: ModelConfig, kind: LayerKind, device: Device) -> tuple[float, float, float]:
    """Seconds of a layer of that kind, of the embedding, and of the head."""
    patterns = {"window_pattern": (kind.window is not None,)} if config.sliding_window is not None else {}
    patterns |= {"moe_pattern": (kind.moe,)} if config.num_experts else {}
    alike = lambda num_layers: replace(config, num_layers=num_layers, **patterns)
    seconds = lambda num_layers: CostModel(model=alike(num_layers), device=device).stage_s(_DECODES, _CHUNKS)[0]
    layer_s = seconds(2) - seconds(1)
    first_s, last_s = CostModel(model=alike(2), device=device, pipeline_parallel=2).stage_s(_DECODES, _CHUNKS)
    return layer_s, max(first_s - layer_s, 0.0), max(last_s - layer_s, 0.0)
