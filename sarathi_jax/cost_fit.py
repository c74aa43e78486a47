"""Fits `hardware.Efficiency` and links to measured files, once per device, and says how well they predict others.

    python -m sarathi_jax.cost_fit operators a100 gemm_a100_llama3_8b.csv gemm_a100_llama2_70b.csv ...
    python -m sarathi_jax.cost_fit links network_a100.csv
    python -m sarathi_jax.cost_fit batches a100-pairs yi-34b-200k figure-2_decode.csv figure-2_prefill.csv \\
        --tensor_parallel 2 --context 1022 --skip 256

"operators" fits to the first file and predicts all of them. Formats are those of Vidur's profiles (a row has the median
milliseconds of each operator of a layer, by tokens and tensor parallelism) and of Sarathi-Serve's artifact (a row is a
batch and its seconds).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sarathi_jax.budget import Iteration, Sample
from sarathi_jax.cost_model import CostModel
from sarathi_jax.hardware import Device, Link, find_device
from sarathi_jax.known_models import model_config
from sarathi_jax.roofline import Matmul, all_reduce_s, elementwise_s, matmul_s, send_s

_SIZES = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers")
_MATMULS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
_ELEMENTWISE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add")
_BOUNDS = {
    _MATMULS: {"math": (0.3, 1.0), "memory": (0.3, 1.0), "matmul_kernel_s": (0.0, 1e-5)},
    _ELEMENTWISE: {"elementwise": (0.1, 1.0), "kernel_s": (0.0, 1e-5)},
}


class Measured(NamedTuple):
    """One operator at one size: `work` is its matmul, or the values it moves for a token; seconds by token count."""

    operator: str
    work: Matmul | int
    num_tokens: np.ndarray
    seconds: np.ndarray


class Error(NamedTuple):
    """Relative errors of predictions."""

    num_times: int
    median: float
    p90: float

    def __str__(self) -> str:
        return f"n={self.num_times:5}  median {self.median:6.1%}  P90 {self.p90:6.1%}"


def read_rows(path: str | Path, numbers: Sequence[str], words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of a CSV file: the columns `numbers` as finite numbers, `words` as they are.

    ValueError for columns that are missing, by name, for a value that is no number, by line, and for no rows at all.
    """
    rows = []
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or ()
        if missing := [name for name in (*numbers, *words) if name not in header]:
            raise ValueError(f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(header)}")
        for row in reader:
            values: dict[str, Any] = {name: row[name] for name in words}
            for name in numbers:
                try:
                    values[name] = float(row[name])
                except (TypeError, ValueError):
                    values[name] = float("nan")
                if not np.isfinite(values[name]):
                    raise ValueError(f"{path}, line {reader.line_num}: {name}={row[name]!r} must be a finite number")
            rows.append(values)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def read_profile(path: str | Path) -> list[Measured]:
    """The operators of a profile, each at every degree of tensor parallelism."""
    operators = [f"{name}.median" for name in (*_MATMULS, *_ELEMENTWISE)]
    groups: dict[tuple[str, Matmul | int], list[tuple[float, float]]] = {}
    for row in read_rows(path, (*_SIZES, *operators), ("use_gated_mlp",)):
        for name, work in _works(row).items():
            groups.setdefault((name, work), []).append((row["num_tokens"], row[f"{name}.median"] / 1e3))
    result = []
    for (name, work), points in groups.items():
        tokens, seconds = np.array(sorted(points)).T
        timed = seconds > 0  # 0 is under the resolution of the file
        result.append(Measured(name, work, tokens[timed], seconds[timed]))
    return result


def _works(row: Mapping[str, Any]) -> dict[str, Matmul | int]:
    """What each operator of a row does on one device."""
    gated = row["use_gated_mlp"] == "True"
    heads, kv_heads, hidden, width, _, tp = (int(row[name]) for name in _SIZES)
    head_dim, width, own_heads, own_kv = hidden // heads, width // tp, heads // tp, max(kv_heads // tp, 1)
    return {
        "attn_pre_proj": Matmul(hidden, head_dim * (own_heads + 2 * own_kv)),
        "attn_post_proj": Matmul(head_dim * own_heads, hidden),
        "mlp_up_proj": Matmul(hidden, (1 + gated) * width),
        "mlp_down_proj": Matmul(width, hidden),
        "input_layernorm": 2 * hidden,
        "post_attention_layernorm": 2 * hidden,
        "attn_rope": 2 * head_dim * (own_heads + own_kv),
        "mlp_act": (2 + gated) * width,
        "add": 3 * hidden,
    }


def read_batches(path: str | Path, *, context: int) -> list[Sample]:
    """Iterations of the artifact's tables: decodes that attend to `context` tokens, and one fresh prompt."""
    rows = read_rows(path, ("batch_num_prefill_tokens", "batch_num_decode_tokens", "batch_execution_time"))
    samples = []
    for row in rows:
        prefill, decodes = int(row["batch_num_prefill_tokens"]), int(row["batch_num_decode_tokens"])
        chunks = ((0, prefill),) if prefill else ()
        samples.append(Sample(Iteration((context,) * decodes, chunks), row["batch_execution_time"]))
    return samples


def predict_s(device: Device, measured: Measured) -> np.ndarray:
    if isinstance(measured.work, Matmul):
        return matmul_s(device, measured.num_tokens, measured.work)
    return elementwise_s(device, measured.num_tokens * measured.work)


def error(predicted: Iterable[float], measured: Iterable[float]) -> Error:
    predicted, measured = np.array(list(predicted)), np.array(list(measured))
    relative = np.abs(predicted / measured - 1)
    return Error(len(relative), float(np.median(relative)), float(np.quantile(relative, 0.9)))


def operator_errors(device: Device, profile: Sequence[Measured]) -> dict[str, Error]:
    """By operator, and of all matmuls together ("matmuls")."""
    groups: dict[str, list[Measured]] = {}
    for measured in profile:
        groups.setdefault(measured.operator, []).append(measured)
        if measured.operator in _MATMULS:
            groups.setdefault("matmuls", []).append(measured)
    return {
        name: error(np.concatenate([predict_s(device, m) for m in group]), np.concatenate([m.seconds for m in group]))
        for name, group in groups.items()
    }


def minimise(
    loss: Callable[[dict[str, float]], float], start: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Coordinate search: one name after the other over a grid of its bounds, which then shrink around the best."""
    best, reach = dict(start), {name: high - low for name, (low, high) in bounds.items()}
    best_loss = loss(best)
    for _ in range(8):
        for name, (low, high) in bounds.items():
            centre = best[name]
            grid = np.linspace(max(low, centre - reach[name]), min(high, centre + reach[name]), 13)
            for value in grid.tolist():
                if (value_loss := loss({**best, name: value})) < best_loss:
                    best, best_loss = {**best, name: value}, value_loss
            reach[name] *= 0.5
    return best


def fit_operators(device: Device, profile: Sequence[Measured]) -> Device:
    """The device with the shares that predict this profile best, in mean absolute logarithm."""

    def loss_of(names: Iterable[str]) -> Callable[[dict[str, float]], float]:
        chosen = [measured for measured in profile if measured.operator in names]

        def loss(values: dict[str, float]) -> float:
            candidate = replace(device, efficiency=replace(device.efficiency, **values))
            logs = [np.abs(np.log(predict_s(candidate, m) / m.seconds)) for m in chosen]
            return float(np.mean(np.concatenate(logs)))

        return loss

    for names, bounds in _BOUNDS.items():
        start = {name: getattr(device.efficiency, name) for name in bounds}
        best = minimise(loss_of(names), start, bounds)
        device = replace(device, efficiency=replace(device.efficiency, **best))
    return device


class Collective(NamedTuple):
    """`num_workers` devices, `devices_per_node` of them in each node, of a machine."""

    topology: str
    collective: str
    num_workers: int
    devices_per_node: int


def read_network(path: str | Path) -> dict[Collective, np.ndarray]:
    """[n, 2], bytes and seconds, of each collective."""
    numbers = ("num_workers", "devices_per_node", "size_bytes", "median_ms")
    groups: dict[Collective, list[tuple[float, float]]] = {}
    for row in read_rows(path, numbers, ("topology", "collective")):
        key = Collective(row["topology"], row["collective"], int(row["num_workers"]), int(row["devices_per_node"]))
        groups.setdefault(key, []).append((row["size_bytes"], row["median_ms"] / 1e3))
    return {key: np.array(sorted(points)) for key, points in groups.items()}


def fit_link(points: np.ndarray, *, num_devices: int = 1) -> tuple[Link, Error]:
    """The link whose all-reduce over `num_devices` (1: whose send) predicts [n, 2] bytes and seconds best."""
    num_bytes, seconds = points.T
    weights = np.gradient(np.log(num_bytes))  # a decade of sizes counts like any other, however many points it has

    def predicted(values: Mapping[str, float]) -> np.ndarray:
        link = Link(bytes_per_s=10 ** values["log_rate"], latency_s=values["latency_s"])
        return all_reduce_s(link, num_devices, num_bytes) if num_devices > 1 else send_s(link, num_bytes)

    def loss(values: dict[str, float]) -> float:
        return float(np.average(np.abs(np.log(predicted(values) / seconds)), weights=weights))

    best = minimise(loss, {"log_rate": 11.0, "latency_s": 2e-5}, {"log_rate": (9.0, 12.5), "latency_s": (0.0, 1e-3)})
    link = Link(bytes_per_s=10 ** best["log_rate"], latency_s=best["latency_s"])
    return link, error(predicted(best), seconds)


def fit_iterations(cost: CostModel, samples: Sequence[Sample]) -> CostModel:
    """The cost model with the shares for attention, and the host's time, that predict these iterations best."""
    bounds = {"chunk_attention": (0.02, 1.0), "decode_attention": (0.02, 1.0), "host_s": (0.0, 0.05)}

    def with_shares(values: dict[str, float]) -> CostModel:
        efficiency = replace(cost.device.efficiency, **values)
        return replace(cost, device=replace(cost.device, efficiency=efficiency))

    def loss(values: dict[str, float]) -> float:
        candidate = with_shares(values)
        return float(np.mean([abs(np.log(candidate(*s.iteration) / s.seconds)) for s in samples]))

    return with_shares(minimise(loss, {name: getattr(cost.device.efficiency, name) for name in bounds}, bounds))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fits a device's efficiency to measured files.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, files in (("operators", "profiles"), ("links", "network"), ("batches", "batches")):
        command = commands.add_parser(name)
        if name != "links":
            command.add_argument("device")
        if name == "batches":
            command.add_argument("model")
            command.add_argument("--tensor_parallel", type=int, default=1)
            command.add_argument("--context", type=int, required=True, help="tokens that each decode attends to")
            command.add_argument("--skip", type=int, nargs="*", default=[], help="batches of so many tokens")
        command.add_argument(files, type=Path, nargs="+")
    args = parser.parse_args()
    if args.command == "operators":
        device = fit_operators(find_device(args.device), read_profile(args.profiles[0]))
        print(device.efficiency)
        for path in args.profiles:
            for operator, found in operator_errors(device, read_profile(path)).items():
                print(f"{path.name:32} {operator:26} {found}")
    elif args.command == "links":
        for path in args.network:
            for key, points in read_network(path).items():
                link, found = fit_link(points, num_devices=key.num_workers if key.collective == "all_reduce" else 1)
                print(f"{'_'.join(map(str, key)):44} {link}  {found}")
    else:
        cost = CostModel(
            model=model_config(args.model), device=find_device(args.device), tensor_parallel=args.tensor_parallel
        )
        samples = [s for path in args.batches for s in read_batches(path, context=args.context)]
        samples = [sample for sample in samples if sample.iteration.num_tokens not in args.skip]
        cost = fit_iterations(cost, samples)
        print(cost.device.efficiency)
        print(error([cost(*s.iteration) for s in samples], [s.seconds for s in samples]))


if __name__ == "__main__":
    main()
