"""Timing iterations on the device: any mix of decodes and chunks, made to order, and a profile of a machine."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from sarathi_jax import budget, device
from sarathi_jax.attention import xla
from sarathi_jax.budget import Iteration, Sample, TimeModel
from sarathi_jax.progress import progress_bar
from sarathi_jax.request import Chunk, Request, SamplingParams, Sequence, StepPlan
from sarathi_jax.runner import Runner
from sarathi_jax.schedulers import Sarathi


class IterationTime(NamedTuple):
    """One run (s): until its tokens are on the host, and the host's part before the device begins."""

    wall_s: float
    host_s: float


def make_plan(runner: Runner, iteration: Iteration) -> StepPlan:
    """The plan of an iteration: greedy sequences of random tokens, on pages from 0 up. Only for a runner nobody uses.

    Raises:
      ValueError: more sequences, pages or positions than there are.
    """
    shapes = runner.shapes
    spans = [(context - 1, 1) for context in iteration.decodes] + list(iteration.chunks)
    pages = [-(-(start + tokens) // shapes.page_size) for start, tokens in spans]
    if any(start < 0 or tokens < 1 for start, tokens in spans) or max(pages, default=0) > shapes.max_pages:
        raise ValueError(f"{iteration} must lie within {shapes.max_pages * shapes.page_size} positions")
    if not spans or len(spans) > shapes.num_slots or sum(pages) > shapes.num_pages:
        raise ValueError(
            f"{iteration} takes {len(spans)} sequences and {sum(pages)} pages; there are {shapes.num_slots} "
            f"(max_num_seqs) and {shapes.num_pages} (num_pages)"
        )
    rng, free = np.random.default_rng(0), iter(range(shapes.num_pages))
    chunks = []
    for slot, ((start, tokens), num_pages) in enumerate(zip(spans, pages, strict=True)):
        ids = tuple(rng.integers(runner.config.vocab_size, size=start + tokens).tolist())
        params = SamplingParams(temperature=0)
        request = Request(request_id=f"{slot}", prompt_token_ids=ids, params=params, arrival_time_s=0.0)
        seq = Sequence(request, slot, slot=slot)
        seq.page_ids = [next(free) for _ in range(num_pages)]
        chunks.append(Chunk(seq, start, tokens, samples=True))
    return StepPlan(chunks=tuple(chunks), admitted=tuple(chunk.sequence for chunk in chunks))


def time_plan(runner: Runner, plan: StepPlan) -> IterationTime:
    """Run a plan of `make_plan` once. It may be repeated: the same keys and values are written again."""
    start = time.perf_counter()
    runner.execute(plan).read()
    return IterationTime(time.perf_counter() - start, runner.host_s)


def profile(
    runner: Runner,
    *,
    max_model_len: int,
    max_tokens: int,
    repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Sample], list[Sample]]:
    """Measured iterations, medians of `repeats` after one more: those to fit a time model to, and held-out hybrids.

    Of shapes up to `max_tokens` rows. Iterations that do not fit the pool are left out.
    """
    to_fit, held_out = budget.profile_plan(
        _shapes(runner, max_tokens), max_num_seqs=runner.shapes.num_slots, max_model_len=max_model_len
    )
    plans = []
    for iteration in to_fit + held_out:
        try:
            plans.append(make_plan(runner, iteration))
        except ValueError:
            plans.append(None)
    times: list[list[float]] = [[] for _ in plans]
    total, done = (repeats + 1) * sum(plan is not None for plan in plans), 0
    for turn in range(repeats + 1):  # in turn, so that a slow minute does not fall on one of them
        for plan, seconds in zip(plans, times, strict=True):
            if plan is None:
                continue
            wall = time_plan(runner, plan).wall_s
            if turn:
                seconds.append(wall)
            done += 1
            if progress:
                progress(done, total)
    samples = [
        Sample(iteration, statistics.median(seconds)) if seconds else None
        for iteration, seconds in zip(to_fit + held_out, times, strict=True)
    ]
    cut = len(to_fit)
    return [s for s in samples[:cut] if s], [s for s in samples[cut:] if s]


def calibrate(
    runner: Runner,
    *,
    max_model_len: int,
    max_tokens: int,
    repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> TimeModel:
    """Profile the machine and fit the time model of iterations up to `max_tokens` rows (seconds to minutes)."""
    samples, held_out = profile(
        runner, max_model_len=max_model_len, max_tokens=max_tokens, repeats=repeats, progress=progress
    )
    return fit(runner, samples, held_out, max_tokens=max_tokens)


def time_model(
    runner: Runner, *, max_model_len: int, max_tokens: int, folder: Path | None, progress: bool | None = None
) -> TimeModel:
    """`calibrate` under a bar, or the result of an earlier one in `folder` on the same machine, model and shapes."""
    model = None if folder is None else kept_time_model(runner, max_tokens=max_tokens, folder=folder)
    if model is None:
        with progress_bar("calibrating", "iterations", show=progress) as report:
            model = calibrate(runner, max_model_len=max_model_len, max_tokens=max_tokens, progress=report)
        if folder is not None:
            model.save(_path(folder, machine(runner, max_tokens)))
    return model


def kept_time_model(runner: Runner, *, max_tokens: int, folder: Path) -> TimeModel | None:
    """What `time_model` has left in the folder; None where that is nothing, or unreadable."""
    name = machine(runner, max_tokens)
    with contextlib.suppress(ValueError):
        model = TimeModel.load(_path(folder, name))
        return model if model.machine == name else None
    return None


def token_budget(config: Sarathi, model: TimeModel, max_model_len: int) -> int:
    """The largest that holds the policy's SLO, all decodes and the chunk half-way through the model's length."""
    assert config.tbt_slo_s is not None
    return budget.choose_budget(
        model,
        tbt_slo_s=config.tbt_slo_s,
        max_num_seqs=config.max_num_seqs,
        context=max(max_model_len // 2, 1),
        tile=device.tile(),
    )


def fit(runner: Runner, samples: list[Sample], held_out: list[Sample], *, max_tokens: int) -> TimeModel:
    """The time model of a profile of this runner."""
    return budget.fit(
        samples,
        _shapes(runner, max_tokens),
        held_out=held_out,
        decode_group=xla.DECODE_ROWS,
        machine=machine(runner, max_tokens),
    )


def _path(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def _shapes(runner: Runner, max_tokens: int) -> list[int]:
    shapes = runner.shapes.num_tokens
    return [rows for rows in shapes if rows <= max_tokens] or [shapes[0]]


def machine(runner: Runner, max_tokens: int) -> str:
    """What a time model holds for: device, jax, model, dtype and shapes."""
    c, s, first = runner.config, runner.shapes, jax.devices()[0]
    rows = ",".join(map(str, _shapes(runner, max_tokens)))
    stages = "".join(f" tensor-{mesh.size}" for mesh in runner.meshes)
    processes = {each.process_index for mesh in runner.meshes for each in mesh.devices.flat}
    if len(processes) > 1:
        stages += f" processes-{len(processes)}"
    return (
        f"{first.platform} {first.device_kind} {device.processor()} jax-{jax.__version__} "
        f"{c.architecture} {c.num_layers}x{c.hidden_size}"
        f"x{c.intermediate_size} {c.num_heads}/{c.num_kv_heads}x{c.head_dim} vocab-{c.vocab_size} "
        f"{runner.kv.k.dtype.name} pages-of-{s.page_size} rows-{rows} seqs-{s.num_slots}{stages}"
    )
