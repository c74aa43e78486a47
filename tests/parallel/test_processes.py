"""Two processes with two devices each as one engine; and what happens when one of them does not do its part."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sarathi_jax import distributed
from sarathi_jax.channel import Channel, GroupError

PROCESS = Path(__file__).with_name("process.py")
_SPEC = importlib.util.spec_from_file_location("process", PROCESS)
process = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(process)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def start(scenario: str, folder: Path) -> list[tuple[int, str]]:
    """Exit codes and what was said, of process 0 and 1. Neither may hang."""
    ports = ",".join(map(str, free_ports(2)))
    started = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), scenario, ports, str(i), str(folder / "answers.json")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        return [(p.communicate(timeout=400)[0], p.returncode)[::-1] for p in started]
    finally:
        for each in started:
            each.kill()


def test_the_same_tokens_as_one_device(tmp_path):
    ended = start("all well", tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    alone = process.run(process.make_engine(None))
    assert json.loads((tmp_path / "answers.json").read_text()) == alone


def test_processes_that_differ_are_refused(monkeypatch):
    """A pool of another size would give other plans: both sides hear of it before anything runs."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    (port,) = free_ports(1)

    def take_part(process_id: int) -> str:
        channel = Channel("127.0.0.1", port, num_processes=2, process_id=process_id, timeout_s=60)
        engine = process.make_engine(None, num_pages=24 + process_id)
        with pytest.raises(GroupError) as error:
            distributed.serve(engine, channel, lambda leader: pytest.fail("it began"))
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        messages = list(threads.map(take_part, range(2)))
    for message in messages:
        assert re.search(
            r"process 1 and process 0 differ in shapes: .*num_pages=25.*num_pages=24.*; start all", message
        )


def test_a_process_that_never_comes_is_missed():
    (port,) = free_ports(1)
    with pytest.raises(GroupError, match=r"processes \[1, 2\] did not come within 0 s"):
        Channel("127.0.0.1", port, num_processes=3, process_id=0, timeout_s=0.2)
    with pytest.raises(GroupError, match=f"process 0 was not at 127.0.0.1:{port}"):
        Channel("127.0.0.1", port, num_processes=3, process_id=2, timeout_s=0.2)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("out of step", "process 1 fell out of step with process 0: it planned"),
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
    assert not (tmp_path / "answers.json").exists()
