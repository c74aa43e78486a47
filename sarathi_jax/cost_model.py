"""Seconds of an iteration on hardware one does not have.

A roofline per operator, T = max(T_math, T_memory): matmuls in waves of whole tiles; attention apart for decodes and for
chunks, which read the keys of earlier chunks again; all-reduces and hops from latency and bandwidth; one pipeline stage
after the other. What kernels get of the peaks are the few shares of `hardware.Efficiency`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from sarathi_jax.attention_cost import key_bytes, keys_and_pairs, pair_flops
from sarathi_jax.config import ModelConfig, check_instance, check_number, check_positive
from sarathi_jax.hardware import Device, Link
from sarathi_jax.roofline import Matmul, all_reduce_s, elementwise_s, matmul_s, send_s
from sarathi_jax.schedulers.base import IterationCost

_BLOCK = 1024
"""Token counts are tabulated so many at a time."""

_GIB = 2**30


class StageCost(Protocol):
    """What a simulator asks: the time of an iteration, stage by stage.

    `stage_s`: seconds that each of `num_stages` pipeline stages works on the iteration, first to last. `hop_s`: seconds
    that the activations of `num_tokens` take from a stage to the next. `host_s`: seconds of an iteration on the host,
    in neither of them; an engine that plans ahead hides it behind the stages.
    `decodes` and `chunks` are those of `schedulers.base.IterationCost`.
    """

    @property
    def num_stages(self) -> int: ...

    @property
    def host_s(self) -> float: ...

    def stage_s(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> tuple[float, ...]: ...

    def hop_s(self, num_tokens: int) -> float: ...


@dataclass(frozen=True)
class OneStage:
    """Any iteration cost, a `budget.TimeModel` say, as one stage: what the host did is in the time it measured."""

    cost: IterationCost
    num_stages: int = 1
    host_s: float = 0.0

    def stage_s(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        return (self.cost(decodes, chunks),)

    def hop_s(self, num_tokens: int) -> float:
        return 0.0


def as_stages(cost: IterationCost | StageCost) -> StageCost:
    """`cost` itself if it knows stages, else wrapped in `OneStage`."""
    return cost if hasattr(cost, "stage_s") else OneStage(cost)  # pyright: ignore[reportReturnType, reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Predicts iterations of a model on `tensor_parallel` x `pipeline_parallel` devices, weights split evenly.

    A cost for schedulers (`cost(decodes, chunks)`) and for simulators (`StageCost`). A group of devices that does not
    fit a node uses the link between nodes. Decodes count by their number and the keys that they read, nothing else.
    `value_bytes` is the size of a weight, an activation, a key's or a value's number.
    """

    model: ModelConfig
    device: Device
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    value_bytes: int = 2

    def __post_init__(self) -> None:
        check_instance("model", self.model, ModelConfig)
        check_instance("device", self.device, Device)
        for name in ("tensor_parallel", "pipeline_parallel", "value_bytes"):
            check_positive(name, getattr(self, name))
        model, sizes = self.model, range(1, self.model.num_heads + 1)
        if not _splits(model, self.tensor_parallel):
            works = ", ".join(str(n) for n in sizes if _splits(model, n))
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} must divide num_heads={model.num_heads} and the MLP's "
                f"{_mlp_widths(model)} columns, and divide num_kv_heads={model.num_kv_heads} or be a multiple of it; "
                f"sizes that do: {works}"
            )
        if model.num_layers % self.pipeline_parallel:
            works = ", ".join(str(n) for n in range(1, model.num_layers + 1) if model.num_layers % n == 0)
            raise ValueError(
                f"pipeline_parallel={self.pipeline_parallel} must divide num_layers={model.num_layers}; "
                f"sizes that do: {works}"
            )

    # What schedulers and simulators ask.

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel

    @property
    def host_s(self) -> float:
        return self.device.efficiency.host_s

    def __call__(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of an iteration that is alone: host, every stage, and the hops between them."""
        hops_s = 0.0
        if self.num_stages > 1:
            hops_s = (self.num_stages - 1) * self.hop_s(len(decodes) + sum(tokens for _, tokens in chunks))
        return self.host_s + sum(self.stage_s(decodes, chunks)) + hops_s

    def stage_s(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        return self.features_s(len(decodes), self.keys(decodes), chunks)

    def hop_s(self, num_tokens: int) -> float:
        """The activations, over the link of all devices together; over a node's network they go once."""
        return send_s(self.pipeline_link, num_tokens * self.model.hidden_size * self.value_bytes)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers; None is full attention."""
        return tuple(dict.fromkeys(self.model.layer_windows))

    def keys(self, decodes: Sequence[int]) -> tuple[int, ...]:
        """Keys that these decodes read in a layer of each of `windows`."""
        longest = max(decodes, default=0)
        return tuple(
            [
                sum(decodes) if window is None or longest <= window else sum([min(n, window) for n in decodes])
                for window in self.windows
            ]
        )

    def features_s(self, num_decodes: int, keys: Sequence[int], chunks: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """`stage_s` from all it depends on, for callers who keep the number of decodes and their `keys` themselves."""
        num_tokens = num_decodes + sum([tokens for _, tokens in chunks])
        if num_tokens == 0:
            return (0.0,) * self.num_stages
        attention = []
        for window, num_keys in zip(self.windows, keys, strict=True):
            seconds = self._kernel_s + num_keys * self._key_s if num_decodes else 0.0
            for start, tokens in chunks:
                seconds += self._chunk_s(window, start, tokens)
            attention.append(seconds)
        block, i = divmod(num_tokens, _BLOCK)
        stages = list((self._tables.get(block) or self._tabulate(block))[i])
        for stage, counts in enumerate(self._stage_windows):
            for count, seconds in zip(counts, attention, strict=True):
                stages[stage] += count * seconds
        stages[-1] += self._head_s(num_decodes + len(chunks))
        return tuple(stages)

    # What it is made of.

    def matmuls_s(self, num_tokens: int) -> dict[str, float]:
        """Seconds of each matmul of the last layer."""
        tokens = np.array([num_tokens])
        named = self._matmuls(self.model.layer_kinds[-1].moe)
        return {name: float(matmul_s(self.device, tokens, m, self.value_bytes)[0]) for name, m in named.items()}

    def operators_s(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> dict[str, float]:
        """Seconds of an iteration that is alone, by kind of operator; their sum is the iteration's.

        "linear": matmuls, the head's too; "attention"; "communication": all-reduces, gathered logits, hops; "others":
        norms, rotations, activations, sums, embeddings; "host".
        """
        num_tokens = len(decodes) + sum(tokens for _, tokens in chunks)
        parts: dict[str, float] = {"linear": 0.0, "communication": 0.0, "others": 0.0, "host": self.host_s}
        if num_tokens == 0:
            return {**parts, "attention": 0.0}
        for kind, seconds in [
            *self._layers_s(np.array([num_tokens]), slice(None)),
            *self._embedding_s(np.array([num_tokens])),
            *self._logits_s(np.array([len(decodes) + len(chunks)])),
        ]:
            parts[kind] += float(seconds[0])
        parts["communication"] += (self.num_stages - 1) * self.hop_s(num_tokens) if self.num_stages > 1 else 0.0
        return {**parts, "attention": self(decodes, chunks) - sum(parts.values())}

    def _matmuls(self, moe: bool) -> dict[str, Matmul]:
        """Those of a layer, on one device."""
        m, tp = self.model, self.tensor_parallel
        width, experts = m.intermediate_size // tp, (1, 1)
        if moe:
            width, experts = m.expert_size // tp, (m.num_experts, m.experts_per_token)
        matmuls = {
            "qkv": Matmul(m.hidden_size, m.head_dim * (m.num_heads // tp + 2 * self._num_kv_heads)),
            "out": Matmul(m.head_dim * m.num_heads // tp, m.hidden_size),
            "up": Matmul(m.hidden_size, (1 + m.gated_mlp) * width, *experts),
            "down": Matmul(width, m.hidden_size, *experts),
        }
        return {**matmuls, "router": Matmul(m.hidden_size, m.num_experts)} if moe else matmuls

    def _layers_s(self, tokens: np.ndarray, layers: slice) -> list[tuple[str, np.ndarray]]:
        """These layers without attention: kind of operator and seconds for each token count."""
        m, tp, parts = self.model, self.tensor_parallel, []
        num_norms = (1 if m.block == "parallel_shared_norm" else 2) + 2 * m.post_norms
        num_sums = 2 if m.block == "sequential" else 1
        rotated = (m.num_heads // tp + self._num_kv_heads) * m.head_dim * ((m.positions == "rope") + m.qk_norm)
        for moe, count in Counter(kind.moe for kind in m.layer_kinds[layers]).items():
            width = (m.expert_size * m.experts_per_token if moe else m.intermediate_size) // tp
            values = m.hidden_size * (2 * num_norms + 3 * num_sums) + 2 * rotated + (2 + m.gated_mlp) * width
            num_kernels = num_norms + num_sums + 1 + (rotated > 0)
            reduce_s = all_reduce_s(self.tensor_link, tp, tokens * m.hidden_size * self.value_bytes)
            parts += [
                ("linear", count * matmul_s(self.device, tokens, matmul, self.value_bytes))
                for matmul in self._matmuls(moe).values()
            ]
            parts.append(("others", count * self._elementwise_s(tokens * values, num_kernels)))
            parts.append(("communication", count * num_sums * reduce_s))
        return parts

    def _embedding_s(self, tokens: np.ndarray) -> list[tuple[str, np.ndarray]]:
        num_values = tokens * self.model.hidden_size
        reduce_s = all_reduce_s(self.tensor_link, self.tensor_parallel, num_values * self.value_bytes)
        return [("others", self._elementwise_s(2 * num_values, 1)), ("communication", reduce_s)]

    def _logits_s(self, num_seqs: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """The last norm and the head, one row a sequence, and the logits' way to one device."""
        tp, columns = self.tensor_parallel, self._vocab_columns
        matmul = matmul_s(self.device, num_seqs, Matmul(self.model.hidden_size, columns), self.value_bytes)
        num_bytes = (tp - 1) * num_seqs * columns * self.value_bytes
        gather = (tp > 1) * self.tensor_link.latency_s + num_bytes / self.tensor_link.bytes_per_s
        norm = self._elementwise_s(2 * num_seqs * self.model.hidden_size, 1)
        return [("others", norm), ("linear", matmul), ("communication", gather)]

    def _elementwise_s(self, num_values: np.ndarray, num_kernels: int) -> np.ndarray:
        return elementwise_s(self.device, num_values, num_kernels, self.value_bytes)

    def _chunk_s(self, window: int | None, start: int, num_tokens: int) -> float:
        """Attention of a chunk in a layer: each query with the keys up to it, or as many as its window shows."""
        num_keys, pairs = keys_and_pairs(num_tokens, start + num_tokens, window)
        return self._kernel_s + max(pairs * self._pair_s, num_keys * self._key_s)

    # Numbers that do not change, and tables.

    @cached_property
    def _kernel_s(self) -> float:
        return self.device.efficiency.kernel_s

    @cached_property
    def _key_s(self) -> float:
        """A key and its value in a layer: read, or multiplied where that takes longer."""
        rate = self.device.memory_bytes_per_s * self.device.efficiency.decode_attention
        return max(key_bytes(self._num_kv_heads, self.model.head_dim, self.value_bytes) / rate, self._pair_s)

    @cached_property
    def _pair_s(self) -> float:
        """A query and a key in a layer, in all heads of a device."""
        flops = pair_flops(self.model.num_heads, self.model.head_dim) // self.tensor_parallel
        return flops / (self.device.flops_per_s * self.device.efficiency.chunk_attention)

    @property
    def _num_kv_heads(self) -> int:
        """On a device: fewer heads than devices are replicated."""
        return max(self.model.num_kv_heads // self.tensor_parallel, 1)

    @property
    def _vocab_columns(self) -> int:
        """On a device, padded."""
        return -(-self.model.vocab_size // self.tensor_parallel)

    @property
    def tensor_link(self) -> Link:
        return self.device.link(self.tensor_parallel)

    @property
    def pipeline_link(self) -> Link:
        return self.device.link(self.tensor_parallel * self.pipeline_parallel)

    @cached_property
    def _stage_layers(self) -> tuple[slice, ...]:
        each = self.model.num_layers // self.num_stages
        return tuple(slice(each * stage, each * (stage + 1)) for stage in range(self.num_stages))

    @cached_property
    def _stage_windows(self) -> tuple[tuple[int, ...], ...]:
        """How many layers of each stage have each of `windows`."""
        windows = self.model.layer_windows
        return tuple(tuple(windows[layers].count(window) for window in self.windows) for layers in self._stage_layers)

    @cached_property
    def _tables(self) -> dict[int, list[tuple[float, ...]]]:
        return {}

    def _tabulate(self, block: int) -> list[tuple[float, ...]]:
        """Seconds of each stage without attention and logits, for each token count of a block (0 counts as 1)."""
        tokens = np.maximum(np.arange(block * _BLOCK, (block + 1) * _BLOCK), 1)
        stages = [np.sum([s for _, s in self._layers_s(tokens, layers)], axis=0) for layers in self._stage_layers]
        stages[0] += np.sum([s for _, s in self._embedding_s(tokens)], axis=0)
        self._tables[block] = list(map(tuple, np.stack(stages, axis=1).tolist()))
        return self._tables[block]

    @cached_property
    def _head_table(self) -> dict[int, float]:
        return {}

    def _head_s(self, num_seqs: int) -> float:
        if num_seqs not in self._head_table:
            self._head_table[num_seqs] = sum(float(s[0]) for _, s in self._logits_s(np.array([num_seqs])))
        return self._head_table[num_seqs]

    # Memory.

    @cached_property
    def _stage_weights(self) -> tuple[int, ...]:
        """Weights of each stage that an iteration of one token reads on one device; embeddings are looked up."""
        result = []
        for layers in self._stage_layers:
            kinds = [kind.moe for kind in self.model.layer_kinds[layers]]
            result.append(sum(m.inner * m.columns * m.per_token for moe in kinds for m in self._matmuls(moe).values()))
        result[-1] += self._vocab_columns * self.model.hidden_size
        return tuple(result)

    @cached_property
    def weight_bytes(self) -> int:
        """On the device that has most; every stage's norms and biases are counted whole."""
        m, each = self.model, []
        norm = m.hidden_size if m.norm == "rms" else 2 * m.hidden_size
        norms = norm * ((1 if m.block == "parallel_shared_norm" else 2) + 2 * m.post_norms)
        attention = m.head_dim * (m.num_heads + 2 * m.num_kv_heads) * m.qkv_bias + 2 * m.head_dim * m.qk_norm
        mlp = (1 + m.gated_mlp) * m.intermediate_size + m.hidden_size
        for layers in self._stage_layers:
            matmuls = [x for kind in m.layer_kinds[layers] for x in self._matmuls(kind.moe).values()]
            small = norms + attention + m.hidden_size * m.o_bias + mlp * m.mlp_bias
            each.append(sum(x.num_weights for x in matmuls) + small * len(m.layer_kinds[layers]))
        table = self._vocab_columns * m.hidden_size
        each[0] += table + m.max_position * m.hidden_size * (m.positions == "learned")
        each[-1] += norm + (0 if m.tie_embeddings and self.num_stages == 1 else table)
        return max(each) * self.value_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """On one device. Every layer keeps a token as long as any of them may read it, as the paged cache does."""
        layers = self.model.num_layers // self.num_stages
        return layers * key_bytes(self._num_kv_heads, self.model.head_dim, self.value_bytes)

    def kv_tokens(self, *, memory_fraction: float = 0.9, max_step_tokens: int = 2048, max_num_seqs: int = 128) -> int:
        """Tokens whose keys and values fit beside the weights and the activations of the largest iteration.

        ValueError for a model that does not fit, with what is missing.
        """
        check_number("memory_fraction", memory_fraction, 1e-6, 1.0, "0 < memory_fraction <= 1")
        check_positive("max_step_tokens", max_step_tokens)
        check_positive("max_num_seqs", max_num_seqs)
        m, tp = self.model, self.tensor_parallel
        widest = max(x.columns * x.per_token for kind in m.layer_kinds for x in self._matmuls(kind.moe).values())
        activations = max_step_tokens * (4 * m.hidden_size + 2 * widest) * self.value_bytes
        activations += max_num_seqs * self._vocab_columns * tp * 4
        room = int(self.device.memory_bytes * memory_fraction) - self.weight_bytes - activations
        if room < self.kv_bytes_per_token:
            raise ValueError(
                f"the model does not fit {self.device.name} with tensor_parallel={tp}, pipeline_parallel="
                f"{self.num_stages}: a device needs {self.weight_bytes / _GIB:.2f} GiB for weights and "
                f"{activations / _GIB:.2f} GiB for activations and has {self.device.memory_bytes / _GIB:.2f} GiB x "
                f"memory_fraction={memory_fraction}: {-room / _GIB:.2f} GiB are missing; use more devices"
            )
        return room // self.kv_bytes_per_token

    @property
    def weight_read_s(self) -> float:
        """What no iteration can undercut: every stage reads its weights once, one after the other."""
        rate = self.device.memory_bytes_per_s * self.device.efficiency.memory
        return sum(self._stage_weights) * self.value_bytes / rate

    def check_slo(self, tbt_slo_s: float) -> None:
        """ValueError for an SLO that not even an iteration of one token can hold."""
        check_number("tbt_slo_s", tbt_slo_s, 1e-9, 1e9, "seconds, > 0")
        if tbt_slo_s < self.weight_read_s:
            raise ValueError(
                f"tbt_slo_s={tbt_slo_s} is under the floor of {self.weight_read_s:.4f} s, in which {self.device.name} "
                f"reads {sum(self._stage_weights) * self.value_bytes / _GIB:.2f} GiB of weights on each of "
                f"{self.tensor_parallel} devices; raise tbt_slo_s or tensor_parallel, or use a faster device"
            )


def _mlp_widths(model: ModelConfig) -> list[int]:
    moes = {kind.moe for kind in model.layer_kinds}
    return [model.expert_size if moe else model.intermediate_size for moe in sorted(moes)]


def _splits(model: ModelConfig, tensor_parallel: int) -> bool:
    kv_heads = model.num_kv_heads
    heads_divide = kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0
    return heads_divide and not any(n % tensor_parallel for n in (model.num_heads, *_mlp_widths(model)))
