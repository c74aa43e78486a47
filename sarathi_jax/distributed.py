"""Several processes as one engine, on JAX's own runtime for many hosts.

Every process has the same engine over the devices of all, and the same scheduler sees the same requests at the same
times: process 0 has the caller, and sends the others what it was asked and the plan that it made of it. They make their
own, compare, and run it. Only devices exchange what is large; the tokens of a step go to processes without the last
stage of a pipeline by process 0.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any, TypeVar

import jax
import numpy as np

from sarathi_jax import device, profiler
from sarathi_jax.channel import Channel, GroupError
from sarathi_jax.config import check_int, check_number
from sarathi_jax.engine import Engine
from sarathi_jax.outputs import RequestOutput, StepStats
from sarathi_jax.pipeline import PipelineRunner
from sarathi_jax.request import SamplingParams, StepPlan
from sarathi_jax.runner import ReadStep, TokenScores
from sarathi_jax.tokenizer import Tokenizer

_T = TypeVar("_T")


def initialize(
    coordinator: str,
    *,
    num_processes: int,
    process_id: int,
    port: int | None = None,
    timeout_s: float = 120.0,
    **options: Any,
) -> Channel:
    """Join the group: before anything else is done with jax. `coordinator` is "host:port" of process 0, for JAX.

    `port`: process 0's for what this module sends, None is the coordinator's + 1. `options` go to
    `jax.distributed.initialize`. Each process has all devices that it sees (left alone JAX gives one under Slurm a GPU
    and no more). GroupError when not all processes have come within `timeout_s`.
    """
    host, _, coordinator_port = coordinator.rpartition(":")
    if not host or not coordinator_port.isdigit():
        raise ValueError(f"coordinator={coordinator!r} must be 'host:port'")
    check_int("num_processes", num_processes, 1, 2**16, "num_processes >= 1")
    check_int("process_id", process_id, 0, num_processes - 1, f"0 <= process_id < num_processes={num_processes}")
    check_number("timeout_s", timeout_s, 0.1, 1e6, "seconds, >= 0.1")
    port = int(coordinator_port) + 1 if port is None else port
    channel = Channel(host, port, num_processes=num_processes, process_id=process_id, timeout_s=timeout_s)
    defaults: dict[str, Any] = {"initialization_timeout": int(timeout_s), "shutdown_timeout_seconds": 10}
    defaults["cluster_detection_method"] = "deactivate"
    jax.distributed.initialize(coordinator, num_processes, process_id, **(defaults | options))
    return channel


def serve(engine: Engine, channel: Channel, main: Callable[[Leader], _T], *, timeout_s: float = 120.0) -> _T | None:
    """Run `main` in process 0 with the engine of all processes; the others follow it, and return None when it is done.

    A token budget "auto" is measured before: process 0 looks at its clock while all run the iterations.

    GroupError in every process if one fails, ends or falls out of step, or if they differ in version or configuration.
    """
    try:
        _agree(engine, channel, timeout_s)
        if isinstance(engine.runner, PipelineRunner):
            engine.runner.relay = Relay(channel, {d.process_index for d in engine.runner.meshes[-1].devices.flat})
        _settle_auto(engine, channel)
        if channel.process_id == 0:
            leader = Leader(engine, channel)
            result = main(leader)
            leader.close(timeout_s)
            return result
        _follow(engine, channel)
        return None
    except GroupError as error:
        failure = channel.settle()
        atexit.register(os._exit, 1)  # before jax's own handler, which would wait for those who have gone, and abort
        if failure not in (None, str(error)):  # what was noticed first, and was the cause
            raise GroupError(failure) from error
        raise
    except BaseException as error:
        failure = channel.settle(wait_s=1.0)
        atexit.register(os._exit, 1)
        if failure is not None:  # a broken connection is what a device sees of another's end
            raise GroupError(failure) from error
        channel.fail(f"process {channel.process_id} failed: {type(error).__name__}: {error}")
        raise
    finally:
        channel.close()


class Relay:
    """What was read of a step, from the first of the processes with the last stage to those without it.

    To be called by all, once a step, in the order of the steps: None where it could not be read.
    """

    def __init__(self, channel: Channel, holders: set[int]):
        self._channel = channel
        self._sender = min(holders)
        self._others = sorted(set(range(1, channel.num_processes)) - holders)

    def __call__(self, step: ReadStep | None) -> ReadStep:
        me, peers = self._channel.process_id, self._channel.peers
        if step is None:
            step = _unpacked(_receive(self._channel, self._sender if me == 0 else 0, "step"))
        elif me == self._sender != 0:
            peers[0].send({"step": _packed(step)})
        if me == 0 and self._others:
            message = {"step": _packed(step)}
            for other in self._others:
                peers[other].send(message)
        return step


class Leader:
    """The engine of process 0, for `main`: what is asked of it is asked of all. The methods are `Engine`'s."""

    def __init__(self, engine: Engine, channel: Channel):
        self.engine = engine
        self._channel = channel
        self._events: list[dict[str, Any]] = []
        self._rng = np.random.default_rng(0)
        engine.on_plan = self._announce

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @property
    def clock(self) -> Callable[[], float]:
        return self.engine.clock

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def num_compiled(self) -> int:
        return self.engine.num_compiled

    @property
    def num_unfinished(self) -> int:
        return self.engine.num_unfinished

    @property
    def last_step(self) -> StepStats | None:
        return self.engine.last_step

    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished()

    def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        params = SamplingParams() if params is None else params
        if isinstance(params, SamplingParams) and params.seed is None:
            params = replace(params, seed=int(self._rng.integers(2**63)))
        if isinstance(prompt_token_ids, Iterable) and not isinstance(prompt_token_ids, str):
            prompt_token_ids = list(prompt_token_ids)
        arrival_time = self.clock() if arrival_time is None else arrival_time
        self.engine.add_request(
            request_id, prompt, prompt_token_ids=prompt_token_ids, params=params, arrival_time=arrival_time,
            priority=priority,
        )  # fmt: skip
        ids = None if prompt_token_ids is None else [int(i) for i in prompt_token_ids]
        event = {"request_id": request_id, "prompt": prompt, "prompt_token_ids": ids, "arrival_time": arrival_time}
        self._events.append({"add": event | {"priority": priority}, "params": _plain(params)})

    def abort(self, request_id: str) -> bool:
        found = self.engine.abort(request_id)
        if found:
            self._events.append({"abort": request_id})
        return found

    def step(self) -> list[RequestOutput]:
        self._channel.check()
        return self.engine.step()

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        self.engine.put_back(outputs)

    def drain(self) -> None:
        """Nothing to wait for: steps that nobody reads end by themselves."""

    def check_integrity(self) -> None:
        self.engine.check_integrity()

    def close(self, timeout_s: float) -> None:
        """Let the others go, and wait until they are done."""
        self._channel.check()
        self._channel.broadcast({"end": True})
        for peer in self._channel.peers.values():
            while "bye" not in peer.receive(timeout_s):
                pass

    def _announce(self, now: float, plan: StepPlan) -> None:
        events, self._events = self._events, []
        self._channel.broadcast({"now": now, "events": events, "plan": _fingerprint(plan)})


def _follow(engine: Engine, channel: Channel) -> None:
    [peer] = channel.peers.values()
    message: dict[str, Any] = {}

    def compare(_: float, plan: StepPlan) -> None:
        if _fingerprint(plan) != message["plan"]:
            raise GroupError(
                f"process {channel.process_id} fell out of step with process 0: it planned {plan.num_tokens} tokens of "
                f"{len(plan.chunks)} sequences at {message['now']} s, and that is not what process 0 planned"
            )

    engine.on_plan = compare
    engine.clock = lambda: message["now"]
    while True:
        message |= peer.receive()
        if "end" in message:
            peer.send({"bye": True})
            return
        for event in message["events"]:
            if "abort" in event:
                engine.abort(event["abort"])
            else:
                engine.add_request(**event["add"], params=_params(event["params"]))
        try:
            engine.step()
        except GroupError as error:
            channel.fail(str(error))
            raise


def _settle_auto(engine: Engine, channel: Channel) -> None:
    """A token budget "auto" to what process 0 measures, or has kept."""
    if engine.auto is None:
        return
    runner, length, max_tokens = engine.runner, engine.max_model_len, device.max_token_budget()
    if channel.process_id == 0:
        kept = profiler.kept_time_model(runner, max_tokens=max_tokens, folder=device.cache_folder("time_models"))
        channel.broadcast({"measure": kept is None})
        budget = profiler.token_budget(engine.auto, kept or engine.time_model(), length)
        channel.broadcast({"token_budget": budget})
    else:
        if _receive(channel, 0, "measure"):
            profiler.profile(runner, max_model_len=length, max_tokens=max_tokens)
        budget = _receive(channel, 0, "token_budget")
    engine.settle_auto(budget)


def _receive(channel: Channel, sender: int, name: str) -> Any:
    """What is due from another process now."""
    message = channel.peers[sender].receive()
    if name not in message:
        raise GroupError(f"process {sender} fell out of step: it sent {sorted(message)} and {name!r} was due")
    return message[name]


def _agree(engine: Engine, channel: Channel, timeout_s: float) -> None:
    """GroupError in all unless all have the same versions and configuration."""
    own = describe(engine)
    if channel.process_id:
        [peer] = channel.peers.values()
        peer.send({"description": own})
        peer.receive(timeout_s)
        return
    for peer in channel.peers.values():
        other = peer.receive(timeout_s).get("description", {})
        wrong = [f"{name}: {other.get(name)} and {own.get(name)}" for name in own if other.get(name) != own.get(name)]
        if wrong:
            text = f"{peer.name} and process 0 differ in {'; '.join(wrong)}; start all with the same"
            channel.fail(text)
            raise GroupError(text)
    channel.broadcast({"agreed": True})


def describe(engine: Engine) -> dict[str, str]:
    """What must be the same in all processes: versions, and whatever decides on plans and programs."""
    names = ("sarathi_jax", "jax", "jaxlib", "flax", "numpy")
    versions = {name: version(name) for name in names} | {"python": platform.python_version()}
    runner = engine.runner
    return versions | {
        "model": repr(runner.config),
        "policy": repr(engine.scheduler.config),
        "shapes": repr(runner.shapes),
        "cache dtype": runner.kv.k.dtype.name,
        "mesh": repr([[d.id for d in mesh.devices.flat] for mesh in runner.meshes]),
        "max_model_len": repr(engine.max_model_len),
        "eos_token_ids": repr(engine.eos_token_ids),
        "lookahead": repr(engine.scheduler.lookahead),
    }


def _fingerprint(plan: StepPlan) -> str:
    """Of what a plan runs, and of the tokens that were read before it."""
    rows = [
        (c.sequence.request.request_id, c.sequence.index, c.start, c.num_tokens, c.sequence.output_token_ids[-1:])
        for c in plan.chunks
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _packed(step: ReadStep) -> dict[str, Any]:
    """For JSON, every bit of it."""
    pack = lambda x: (x.dtype.str, x.shape, base64.b64encode(np.ascontiguousarray(x)).decode())
    scores = [scores and [pack(np.asarray(x)) for x in scores] for scores in (step.scores, step.prompt_scores)]
    return {"tokens": step.tokens, "scores": scores}


def _unpacked(plain: dict[str, Any]) -> ReadStep:
    """Without the rows in which prompts begin."""
    unpack = lambda dtype, shape, data: np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
    scores = [each and TokenScores(*(unpack(*x) for x in each)) for each in plain["scores"]]
    return ReadStep(tokens=plain["tokens"], scores=scores[0], prompt_scores=scores[1], first_rows=())


def _plain(params: SamplingParams) -> dict[str, Any]:
    """For JSON, whose keys are strings."""
    return asdict(params) | {"logit_bias": params.logit_bias and list(params.logit_bias.items())}


def _params(plain: dict[str, Any]) -> SamplingParams:
    plain["logit_bias"] = plain["logit_bias"] and dict(plain["logit_bias"])
    return SamplingParams(**plain)
