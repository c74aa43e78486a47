"""Serving simulated: the engine's own schedulers and page pool over a virtual clock, at the cost of a model of time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sized
from typing import Literal, get_args

from sarathi_jax.config import check_instance, check_number, check_positive
from sarathi_jax.cost_model import StageCost, as_stages
from sarathi_jax.outputs import RequestOutput, StepStats
from sarathi_jax.pages import PagePool
from sarathi_jax.replay import Replay, ReplayDeparted
from sarathi_jax.request import Request, SamplingParams
from sarathi_jax.schedulers import IterationCost, Scheduler, SchedulerConfig
from sarathi_jax.shapes import token_shapes
from sarathi_jax.simulator_replica import Replica, SimulatedSequence

Routing = Literal["least_tokens", "round_robin"]

_READ, _PLAN = 0, 1  # of events at one time those first that give the others something to see


class Simulator:
    """An engine without a model, as a server of the driver: `run_open_loop(Simulator(...), workload)`.

    Plans are those of `scheduler`'s own scheduler on a pool of `num_pages` pages of `page_size` tokens. An iteration
    takes as long as `cost` says: a cost for schedulers (one stage), a `cost_model.StageCost`, or a `Replay`. The clock
    is virtual and starts at `start_s`. Tokens are counted and not made: prompts matter by their length, outputs end by
    length alone, and a request's outputs are handed out with its first token and at its end, times complete.
    `kv_window`: a model's own, behind which an engine gives pages back; None keeps all.

    One stage runs as the engine does: `lookahead` 0 plans a step when the one before is read, 1 while it runs, which
    hides `host_s`. In a pipeline as many micro-batches are in flight as there are stages, each planned just before the
    first stage is free; a sequence whose next token is on its way sits out. Chunks of one prompt follow each other, as
    in the engine; without `overlap_chunks` a sequence is in one micro-batch at a time, as in Sarathi-Serve.

    `num_replicas` such engines, each with a pool of its own, share the requests: each goes, as it arrives, to the one
    with the fewest tokens left to run (outputs to come included), or to each in turn. `tile` as the engine's: budgets
    are multiples of it, and padding to shapes is counted (what it costs is in `cost`); None is none.

    Raises:
      ValueError: a bad argument; and from `step`, a predicted time that is no positive number.
      ReplayDeparted: from `step`, a plan that is not the one measured.
    """

    vocab_size: None = None
    """Prompts are not read: the driver need not make them."""

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cost: IterationCost | StageCost | Replay,
        *,
        num_pages: int,
        page_size: int = 16,
        kv_window: int | None = None,
        max_model_len: int,
        lookahead: int = 0,
        overlap_chunks: bool = True,
        tile: int | None = None,
        default_token_budget: int = 512,
        num_replicas: int = 1,
        routing: Routing = "least_tokens",
        start_s: float = 0.0,
    ):
        check_instance("scheduler", scheduler, SchedulerConfig)
        check_positive("num_replicas", num_replicas)
        if routing not in get_args(Routing):
            raise ValueError(f"routing={routing!r} must be one of {', '.join(map(repr, get_args(Routing)))}")
        check_number("start_s", start_s, -1e12, 1e12, "seconds")
        replay = cost if isinstance(cost, Replay) else None
        stage_cost = None if isinstance(cost, Replay) else _check_cost(cost)
        num_stages = 1 if stage_cost is None else stage_cost.num_stages
        if num_stages > 1 and lookahead:
            raise ValueError(
                f"{lookahead=} with {num_stages} stages: micro-batches in flight are planned ahead already; use 0"
            )
        if replay is not None and num_replicas > 1:
            raise ValueError(f"{num_replicas=}: a replay is of one engine")
        self.max_model_len = max_model_len
        self.last_step: StepStats | None = None
        """The iteration read last."""
        self._replicas: list[Replica] = []
        for index in range(num_replicas):
            pool = PagePool(num_pages, page_size, kv_window)
            built = scheduler.build(
                pool,
                max_model_len=max_model_len,
                tile=tile or 1,
                lookahead=lookahead,
                num_stages=num_stages,
                default_token_budget=default_token_budget,
            )
            shapes = None if tile is None else token_shapes(max(built.max_step_tokens, scheduler.max_num_seqs), tile)
            self._replicas.append(
                Replica(
                    index, built, pool, cost=stage_cost, replay=replay, overlap_chunks=overlap_chunks, shapes=shapes
                )
            )
        self._replay, self._routing = replay, routing
        self._live: dict[str, SimulatedSequence] = {}
        self._next_seq_id = 0
        self._now = start_s if replay is None else replay.start_s
        self._next_arrival_s = math.inf
        self._events: list[tuple[float, int, int]] = []  # a heap of time, kind and replica

    # The driver's `Server`.

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        """Of each replica, for whoever wants to watch."""
        return tuple(replica.scheduler for replica in self._replicas)

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self._now

    def wait_until(self, time_s: float) -> None:
        """Jump there. ValueError while something is unfinished, or for a time that has passed."""
        if self._live:
            raise ValueError(f"{len(self._live)} requests are unfinished: step until they have ended")
        check_number("time_s", time_s, self._now, 1e300, f"the clock is at {self._now} s and does not go backwards")
        self._now = time_s

    def expect(self, time_s: float | None) -> None:
        """The next request comes then (None: none is known of): the next `step` stops there, so that it is on time."""
        self._next_arrival_s = math.inf if time_s is None or self._replay is not None else time_s

    def add_request(
        self,
        request_id: str,
        *,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request, of which lengths count. ValueError, with nothing changed, for one that can never run."""
        if request_id in self._live:
            raise ValueError(f"request_id={request_id!r} is in use by a request that has not ended; choose another")
        for name, none in (
            ("n", 1),
            ("stop", ()),
            ("stop_token_ids", ()),
            ("logprobs", None),
            ("prompt_logprobs", None),
        ):
            if getattr(params, name) != none and self._replay is None:
                raise ValueError(f"{name}={getattr(params, name)!r}: simulated tokens have neither ids nor text")
        request = Request(
            request_id=request_id,
            prompt_token_ids=range(
                len(prompt_token_ids if isinstance(prompt_token_ids, Sized) else [*prompt_token_ids])
            ),
            params=params,
            arrival_time_s=self._now if arrival_time is None else arrival_time,
            priority=priority,
        )
        replica = self._route()
        seq = SimulatedSequence(request, self._next_seq_id, replica=replica)
        seq.max_total_tokens = replica.scheduler.max_total_tokens(seq.prompt_len, params.max_tokens)
        seq.num_outputs = seq.max_total_tokens - seq.prompt_len
        if self._replay is not None:
            seq.num_outputs = self._replay.output_len(request_id, seq.num_outputs)
        replica.scheduler.add(seq)
        self._next_seq_id += 1
        self._live[request_id] = seq
        if replica.num_stages > 1 or not replica.in_flight:  # else when what runs has been read, as an engine does
            self._push_plan(replica)

    def step(self) -> list[RequestOutput]:
        """On to the next iteration's end: the requests that have their first or their last token by it.

        Empty when neither came, and when the clock got to the time of `expect` before.
        """
        next_arrival_s, self._next_arrival_s = self._next_arrival_s, math.inf
        while self._events and self._events[0][0] < next_arrival_s:
            if self._replay is not None and self._events[0][1] == _PLAN:
                seen_s = self._replay.seen_s(self._replicas[0].num_planned)
                if seen_s > self._now:  # whoever calls has something to send before
                    self._now = seen_s
                    return []
            time_s, kind, index = heapq.heappop(self._events)
            self._now = max(self._now, time_s)
            replica = self._replicas[index]
            if kind == _READ:
                return self._read(replica)
            self._plan(replica)
            if self._replay is not None:  # the engine's caller may have sent something between two plans
                return []
        if next_arrival_s < math.inf:
            self._now = max(self._now, next_arrival_s)
        elif self._live:
            self._fail_at_rest()
        return []

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it stands; its pages are free at once. False if there is none of that name.

        After the last one the clock stands where what was in flight has ended.
        """
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        seq.replica.scheduler.finish(seq)
        if not self._live:
            self._events.clear()
            self._now = max([self._now, *(replica.clear() for replica in self._replicas)])
        return True

    def check_integrity(self) -> None:
        """AssertionError unless queues, slots and pages of every replica agree, and all that is alive is in one."""
        for replica in self._replicas:
            replica.scheduler.check_integrity()
        queued = {seq.seq_id for s in self.schedulers for seq in (*s.running, *s.waiting)}
        assert queued == {seq.seq_id for seq in self._live.values()}, "a sequence is lost, or was forgotten in a queue"

    # Inside.

    def _route(self) -> Replica:
        if self._routing == "round_robin" or len(self._replicas) == 1:
            return self._replicas[self._next_seq_id % len(self._replicas)]
        return min(self._replicas, key=lambda replica: replica.scheduler.num_tokens_left)

    def _push_plan(self, replica: Replica) -> None:
        """Have the replica plan, as soon as it may."""
        time_s = math.inf if replica.is_plan_due else replica.next_plan_s(self._now)
        if time_s < math.inf:
            replica.is_plan_due = True
            heapq.heappush(self._events, (time_s, _PLAN, replica.index))

    def _plan(self, replica: Replica) -> None:
        replica.is_plan_due = False
        flight = replica.plan(self._now)
        if flight is not None:
            heapq.heappush(self._events, (flight.end_s, _READ, replica.index))
            self._push_plan(replica)

    def _read(self, replica: Replica) -> list[RequestOutput]:
        self.last_step, outputs = replica.read()
        for output in outputs:
            if output.finished:
                del self._live[output.request_id]
        if replica.scheduler.has_unfinished:
            self._push_plan(replica)
        return outputs

    def _fail_at_rest(self) -> None:
        if self._replay is not None:
            raise ReplayDeparted(
                f"the replay departs at iteration {self._replicas[0].num_planned}: the measured run had no more, and "
                f"{len(self._live)} requests are unfinished"
            )
        raise RuntimeError(
            f"{type(self._replicas[0].scheduler).__name__} plans nothing at {self._now} s with {len(self._live)} "
            f"requests unfinished and nothing in flight: it would be so for ever"
        )


def _check_cost(cost: IterationCost | StageCost) -> StageCost:
    if not callable(cost) and not hasattr(cost, "stage_s"):
        raise ValueError(
            f"cost={cost!r} must be a function (decodes, chunks) -> s such as budget.TimeModel, a cost with stages "
            f"such as cost_model.CostModel, or a Replay"
        )
    stages = as_stages(cost)
    check_positive("num_stages of the cost", stages.num_stages)
    check_number("host_s of the cost", stages.host_s, 0.0, 1e9, "seconds >= 0")
    return stages
