"""A save that is killed, at whatever moment, leaves no folder that passes for a model; then saving works as before."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.saved import MODEL_FILE
from sarathi_jax.models.weights import load_weights

SOURCE = Path(__file__).parent.parent / "golden" / "tiny" / "qwen3"

SAVES = """
import os, resource, signal, sys
from sarathi_jax.models import convert, orbax_weights  # once, for all the processes below

def save(source, target, moment, num_bytes):
    '''Killed before its moment-th step, which is to open, make, rename or remove something where target is to be, or
    before target appears, for moment -1; in the middle of a file longer than num_bytes. Else the number of steps.'''
    num_steps = 0

    def step(event, args):
        nonlocal num_steps
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and isinstance(args[0], (str, bytes)):
            num_steps += os.fsdecode(args[0]).startswith(os.path.dirname(target) + "/")
            if 0 < num_steps == moment or (event, moment) == ("os.rename", -1) and os.fsdecode(args[1]) == target:
                os.kill(os.getpid(), signal.SIGKILL)

    if num_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    sys.addaudithook(step)
    convert.convert(source, target)
    return num_steps

for line in sys.stdin:
    source, target, *numbers = line.split()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(save(source, target, *map(int, numbers))).encode())
        os._exit(0)
    os.close(write)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.read(read, 99).decode() or 0, flush=True)
    os.close(read)
"""


@pytest.fixture(scope="module")
def save():
    """Saves SOURCE in a process of its own: its exit code, and its number of steps where it was not killed."""
    command = [sys.executable, "-c", SAVES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def save(target: Path, *, moment: int = 0, num_bytes: int = 0) -> tuple[int, int]:
            print(SOURCE, target, moment, num_bytes, file=process.stdin, flush=True)
            code, num_steps = map(int, process.stdout.readline().split())
            return code, num_steps

        yield save
        process.stdin.close()


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(w) for name, w in load_weights(open_checkpoint(folder), jnp.dtype(jnp.bfloat16)).items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_killed_at_any_moment(tmp_path, save):
    """Before each step of the first three quarters, most of them Orbax's; before the last, the rename that makes the
    folder appear; and by the kernel while a file is being written."""
    code, num_steps = save(tmp_path / "first" / "model")
    assert code == 0 and num_steps > 10, "there is much to interrupt"
    wanted, target = weights_of(SOURCE), tmp_path / "second" / "model"
    kills = [{"moment": n} for n in (*range(1, 3 * num_steps // 4), -1)]
    for kill in [*kills, {"num_bytes": 100}, {"num_bytes": 5000}]:
        code, _ = save(target, **kill)
        assert code in (-signal.SIGKILL, -signal.SIGXFSZ), kill
        assert not target.exists(), kill
        with pytest.raises(ValueError, match=f"model '{target}' is not found"):
            open_checkpoint(target)
    for left in target.parent.iterdir():
        if (left / MODEL_FILE).exists():  # killed when all was written
            assert same(weights_of(left), wanted)
            continue
        with pytest.raises(ValueError, match=f"'{left}' is a folder without config.json"):
            open_checkpoint(left)
    assert save(target)[0] == 0
    assert same(weights_of(target), wanted)
