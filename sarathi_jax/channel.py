"""Messages between the processes of a group, over sockets: process 0 has one to each of the others.

Every process notices within moments when another has ended or failed, also while it waits for a device: then it says so
and, if what it waits for does not come back, ends.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MAX_BYTES = 1 << 28
"""Of a message: a longer one is no message of ours."""

GRACE_S = 5.0
"""How long a process may still wait for a device after another has failed."""


class GroupError(RuntimeError):
    """Another process failed, ended early or fell out of step; this one cannot go on without it."""


class Peer:
    """A connection to another process. A thread takes what comes: `receive` gives it out, in order."""

    def __init__(self, connection: socket.socket, name: str, on_failure: Callable[[str], None]):
        self.name = name
        self._connection = connection
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._is_done = False
        connection.settimeout(None)
        threading.Thread(target=self._listen, name=f"from {name}", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, allow_nan=False, default=float).encode()
        try:
            self._connection.sendall(struct.pack(">Q", len(data)) + data)
        except OSError as error:
            self._on_failure(f"{self.name} cannot be reached ({error})")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. GroupError when none comes in time, or when a failure or the other's end does."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise GroupError(f"{self.name} said nothing for {timeout_s:.0f} s") from None
        if message is None:
            raise GroupError(f"{self.name} has ended")
        if "failure" in message:
            raise GroupError(message["failure"])
        return message

    def close(self) -> None:
        """What happens to the other process from now on is no failure."""
        self._is_done = True
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                message = json.loads(self._exactly(struct.unpack(">Q", self._exactly(8))[0]))
                if "failure" in message:
                    self._on_failure(message["failure"])
                self._is_done |= "bye" in message
                self._inbox.put(message)
        except (OSError, ValueError, EOFError) as error:
            self._inbox.put(None)
            if not self._is_done:
                self._on_failure(f"{self.name} has ended, or its connection broke ({error or 'closed'})")

    def _exactly(self, size: int) -> bytes:
        if size > MAX_BYTES:
            raise ValueError(f"a message of {size} bytes")
        parts, missing = [], size
        while missing:
            part = self._connection.recv(min(missing, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class Channel:
    """Process `process_id`'s connections: process 0's to all others, another's to process 0.

    `failure` is the first failure that anyone reported. Whoever learns of it tells the others, and ends this process
    `GRACE_S` later unless `settle` was called until then.
    """

    def __init__(self, host: str, port: int, *, num_processes: int, process_id: int, timeout_s: float):
        self.process_id, self.num_processes = process_id, num_processes
        self.failure: str | None = None
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self.peers: dict[int, Peer] = {}
        deadline = time.monotonic() + timeout_s
        if process_id == 0:
            self._accept(port, deadline, timeout_s)
        else:
            self._connect(host, port, deadline, timeout_s)

    def broadcast(self, message: dict[str, Any]) -> None:
        for peer in self.peers.values():
            peer.send(message)

    def check(self) -> None:
        """GroupError if anyone has failed."""
        if self.failure is not None:
            raise GroupError(self.failure)

    def fail(self, text: str) -> None:
        """Tell all that this process fails."""
        with self._lock:
            self.failure = self.failure or text
        self.broadcast({"failure": text})
        self.settle()

    def settle(self, wait_s: float = 0.0) -> str | None:
        """The failure, if there is one or comes within `wait_s`: the caller ends, the process need not be ended."""
        deadline = time.monotonic() + wait_s
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._settled.set()
        return self.failure

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def _accept(self, port: int, deadline: float, timeout_s: float) -> None:
        with socket.create_server(("", port)) as server:
            while len(self.peers) < self.num_processes - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                    connection.settimeout(max(deadline - time.monotonic(), 0.01))
                    other = struct.unpack(">Q", connection.recv(8, socket.MSG_WAITALL))[0]
                except TimeoutError:
                    missing = sorted(set(range(1, self.num_processes)) - self.peers.keys())
                    raise GroupError(f"processes {missing} did not come within {timeout_s:.0f} s") from None
                except (OSError, struct.error):
                    continue  # somebody else's
                if 0 < other < self.num_processes and other not in self.peers:
                    self._add(connection, other)

    def _connect(self, host: str, port: int, deadline: float, timeout_s: float) -> None:
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=1.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise GroupError(f"process 0 was not at {host}:{port} within {timeout_s:.0f} s") from error
                time.sleep(0.1)
        connection.sendall(struct.pack(">Q", self.process_id))
        self._add(connection, 0)

    def _add(self, connection: socket.socket, other: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peers[other] = Peer(connection, f"process {other}", self._note)

    def _note(self, text: str) -> None:
        """A failure that was reported, or noticed."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = text
        print(f"process {self.process_id} cannot go on: {text}", file=sys.stderr, flush=True)
        threading.Thread(target=self._end, daemon=True).start()
        self.broadcast({"failure": text})

    def _end(self) -> None:
        if not self._settled.wait(GRACE_S):
            os._exit(1)
