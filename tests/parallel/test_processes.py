"""Two processes with two devices each as one engine; and what happens when one of them does not do its part."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sarathi_jax import budget, distributed, profiler
from sarathi_jax.channel import Channel, GroupError
from sarathi_jax.models.convert import save_model
from sarathi_jax.runner import ReadStep, TokenScores

PROCESS = Path(__file__).with_name("process.py")
_SPEC = importlib.util.spec_from_file_location("process", PROCESS)
process = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(process)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def as_under_slurm(process_id: int) -> dict[str, str]:
    """What Slurm tells a process that is alone on its node."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "here",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process_id),
        "SLURM_LOCALID": "0",
    }


def start(scenario: str, folder: Path) -> list[tuple[int, str]]:
    """Exit codes and what was said, of process 0 and 1. Neither may hang."""
    ports = ",".join(map(str, free_ports(4)))
    started = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), scenario, ports, str(i), str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"XDG_CACHE_HOME": str(folder)} | as_under_slurm(i),
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        return [(p.communicate(timeout=400)[0], p.returncode)[::-1] for p in started]
    finally:
        for each in started:
            each.kill()


@pytest.fixture(scope="module")
def model():
    return process.make_model()


@pytest.fixture(scope="module")
def answers(tmp_path_factory, model) -> dict:
    """What the two processes answer on each mesh, from a model that was saved by one."""
    folder = tmp_path_factory.mktemp("processes")
    save_model(folder / "saved", process.CONFIG, {name: weight[...] for name, weight in model.weights.items()})
    ended = start("all well", folder)
    assert [code for code, _ in ended] == [0, 0], ended
    return json.loads((folder / "answers0.json").read_text()) | json.loads((folder / "answers1.json").read_text())


@pytest.fixture(scope="module")
def alone(model) -> dict:
    """What one device answers."""
    return process.run(process.make_engine(model, None))


@pytest.mark.parametrize("name", process.MESHES)
def test_the_same_tokens_as_one_device(answers, alone, name):
    """And logprobs, up to the order of float sums; nothing is compiled by then. (TP2 x PP2 has measured its budget.)"""
    same(answers[name][0], alone)


def test_a_process_has_engines_of_its_own(answers, alone):
    """In a group, and the others have no part in it."""
    same(answers["alone"], alone)


def same(answers: dict, wanted: dict) -> None:
    assert answers.keys() == wanted.keys()
    for name, (tokens, *scores) in wanted.items():
        assert answers[name][0] == tokens, name
        for ours, theirs in zip(answers[name][1:], scores, strict=True):
            assert [[token for token, _ in row] for row in ours] == [[token for token, _ in row] for row in theirs]
            flat = lambda rows: [logprob for row in rows for _, logprob in row]
            assert flat(ours) == pytest.approx(flat(theirs), abs=1e-3), name


def test_what_processes_exchange_is_counted(answers):
    """A hop of 16 rows from stage to stage; three from PP4's first to its last."""
    hop = 16 * process.CONFIG.hidden_size * 4
    assert answers["PP4"][1] == 3 * hop
    sums = (2 * 2 + 1) * hop  # two layers of stage 0, and the embeddings
    assert answers["TP2 x PP2"][1] == hop + sums


def test_devices_of_some_processes_alone_are_refused(answers):
    message = r"tensor=2 x pipeline=1 is on devices of processes \[0\], of 2: an engine is of all .*\(they have 4 "
    assert re.search(message, answers["refused Engine in 1"])
    assert answers["refused Engine in 0"] == "nothing"
    for me in range(2):
        assert re.search("data=2 takes devices of other processes", answers[f"refused Replicas in {me}"])


def in_two_threads(
    main: Callable, *, num_pages: tuple[int, int] = (24, 24), auto: bool = False, prepare: Callable = lambda *_: None
) -> list:
    """What `distributed.serve` gives, or the GroupError it raises, in a group of two; an engine each on one device."""
    (port,) = free_ports(1)

    def take_part(process_id: int):
        channel = Channel("127.0.0.1", port, num_processes=2, process_id=process_id, timeout_s=60)
        engine = process.make_engine(process.make_model(), None, num_pages=num_pages[process_id], auto=auto)
        prepare(process_id, engine)
        try:
            return distributed.serve(engine, channel, main), engine
        except GroupError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(take_part, range(2)))


@pytest.mark.filterwarnings("ignore:token_budget=16 is below")
def test_a_measured_budget_is_that_of_process_0(monkeypatch, tmp_path):
    """Both run the iterations, one looks at the clock; what it has kept from another time spares both of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(budget, "profile_plan", process.a_few_iterations)
    profile, runs = profiler.profile, []
    monkeypatch.setattr(profiler, "profile", lambda *args, **options: runs.append(1) or profile(*args, **options))
    monkeypatch.setattr(
        profiler, "fit", lambda runner, *_, max_tokens: replace(
            process.time_model(0.1), machine=profiler.machine(runner, max_tokens)
        )
    )  # fmt: skip
    for num_runs in (2, 2):
        ended = in_two_threads(lambda leader: leader.engine.scheduler.config.token_budget, auto=True)
        assert [result for result, _ in ended] == [16, None]
        assert ended[1][1].scheduler.config.token_budget == 16
        assert ended[1][1].auto is None
        assert len(runs) == num_runs


@pytest.mark.parametrize("holders", [{0}, {1}, {1, 2}, {2}])
def test_what_one_process_read_of_a_step_reaches_all(holders):
    """Bit by bit, by way of process 0, whoever has the last stage; twice, in order."""
    (port,) = free_ports(1)
    scores = TokenScores(np.float32([-np.inf, -0.1]), np.int32([[3], [4]]), np.float32([[np.nan], [-1e-30]]))
    steps = [ReadStep([5, 262], scores, None, ()), ReadStep([7], None, scores, ())]

    def take_part(process_id: int) -> list[ReadStep]:
        channel = Channel("127.0.0.1", port, num_processes=3, process_id=process_id, timeout_s=60)
        relay = distributed.Relay(channel, holders)
        return [relay(step if process_id in holders else None) for step in steps]

    with ThreadPoolExecutor(3) as threads:
        for read in threads.map(take_part, range(3)):
            assert [step.tokens for step in read] == [step.tokens for step in steps]
            assert (read[0].prompt_scores, read[1].scores) == (None, None)
            bits = lambda arrays: [(x.dtype, x.shape, x.tobytes()) for x in arrays]
            assert bits(read[0].scores) == bits(read[1].prompt_scores) == bits(scores)


def test_processes_that_differ_are_refused(monkeypatch):
    """A pool of another size would give other plans: both sides hear of it before anything runs."""
    survive(monkeypatch)
    for error in in_two_threads(lambda leader: pytest.fail("it began"), num_pages=(24, 25)):
        assert re.search(
            r"process 1 and process 0 differ in shapes: .*num_pages=25.*num_pages=24.*; start all", str(error)
        )


def test_a_process_that_falls_out_of_step_is_found_before_it_runs_anything(monkeypatch):
    survive(monkeypatch)

    def prepare(process_id: int, engine) -> None:
        if process_id == 1:
            process.change_plan(engine, 3, lambda plan: plan._replace(chunks=plan.chunks[:1]))

    for error in in_two_threads(process.run, prepare=prepare):
        assert re.search("process 1 fell out of step with process 0: it planned", str(error))


def survive(monkeypatch) -> None:
    """A failure in these threads is not to end the tests' process."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr("sarathi_jax.channel.GRACE_S", 1e6)


def test_a_process_that_never_comes_is_missed():
    (port,) = free_ports(1)
    with pytest.raises(GroupError, match=r"processes \[1, 2\] did not come within 0 s"):
        Channel("127.0.0.1", port, num_processes=3, process_id=0, timeout_s=0.2)
    with pytest.raises(GroupError, match=f"process 0 was not at 127.0.0.1:{port}"):
        Channel("127.0.0.1", port, num_processes=3, process_id=2, timeout_s=0.2)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("follower dies", "process 1 has ended"),
        ("leader dies", "process 0 has ended"),
    ],
)
def test_no_process_waits_for_one_that_failed(tmp_path, scenario, message):
    """Each that is left says why it cannot go on, and ends."""
    ended = start(scenario, tmp_path)
    assert all(code != 0 for code, _ in ended), ended
    left = [text for code, text in ended if code != -9]
    assert left
    for text in left:
        assert re.search(message, text), text
    assert not (tmp_path / "answers0.json").exists()
