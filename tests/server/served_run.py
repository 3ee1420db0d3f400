"""Whole runs of the real global server in virtual time: turns of its loop, its journal, frames from and to workers.

The clock goes on when nothing is left to do now: leases, patience and restarts take no time.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lsgd.plan.plan import Plan
from lsgd.protocol.messages import PROTOCOL, Go, NodeHello, Stop, Upward, decode, encode
from lsgd.protocol.sockets import Listener
from lsgd.server.coordinator import Coordinator
from lsgd.server.daemon import TICK_S
from lsgd.server.global_daemon import NODE_LEASE_S, GlobalDaemon
from lsgd.server.journal import Journal, restore
from lsgd.server.state import Decision, RunState

from .helpers import check_invariants
from .simulated_run import Faults, SimulatedRun, SimulatedWorker


class MemoryListener:
    """Stands in for the socket: a list of what has arrived, and the run that carries what is sent."""

    secured = False

    def __init__(self, run: "ServedRun") -> None:
        self.arrived: list[tuple[bytes, list[bytes]]] = []
        self.gone: list[bytes] = []
        self._run = run

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        arrived, self.arrived = self.arrived, []
        yield from arrived

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        for worker, frame in zip(frames[::2], frames[1::2], strict=True):
            self._run.downward(int(worker or 0), frame)
        return True

    def closed(self) -> list[bytes]:
        gone, self.gone = self.gone, []
        return gone

    def refusals(self) -> Iterator[str]:
        yield from ()


class MemoryJournal(Journal):
    """Has no file, but what was written last."""

    def __init__(self) -> None:
        self.state: str | None = None
        self.elections: list[Any] = []
        self.writes = 0

    def open(self) -> None:
        """Be opened by a process that has just started."""
        self.path, self.resumed = Path("journal"), self.state is not None
        self._version, self._kept_at, self._retry_at = (-1, -1), 0.0, 0.0

    def save(self, state: dict[str, Any], elections: list[Any]) -> None:
        self.state, self.elections = json.dumps(state), elections
        self.writes += 1

    def finish(self) -> None:
        self.state, self.elections = None, []


class ServedRun(SimulatedRun):
    """Workers on nodes whose links can be cut, and a global server that can be killed.

    Args:
        plan, queues, seed, faults: as of a :class:`SimulatedRun`.
    """

    def __init__(self, plan: Plan, queues: list[int], seed: int = 0, faults: Faults | None = None) -> None:
        self.journal = MemoryJournal()
        self.cut: set[int] = set()
        self.server: GlobalDaemon
        super().__init__(plan, queues, seed, faults)
        self._serve(self.coordinator)
        self._greet()

    def _serve(self, coordinator: Coordinator) -> None:
        """Begin to serve, as a process that has just started."""
        self.coordinator = coordinator
        self.listener = MemoryListener(self)
        self.journal.open()
        self.server = GlobalDaemon(coordinator, cast(Listener, self.listener), self.journal, watches_memory=False)
        decide = self.server._act

        def act(decision: Decision) -> None:
            check_invariants(self.state)
            self.notes += decision.notes
            self.failed |= {int(n.split()[1]) for n in decision.notes if n.code.startswith("round_fails")}
            self._check_rounds(decision)
            for worker, incarnation, message in decision.answers:
                if isinstance(message, Go | Stop):
                    self._check_answer(worker, incarnation, message)
            decide(decision)

        self.server._act = act  # type: ignore[method-assign]

    def _greet(self) -> None:
        """Greet for every node, as its local server does."""
        for node in {worker.join.node for worker in self.workers} - self.cut:
            self._arrives(node, encode(NodeHello(PROTOCOL, node, 1, f"host{node}", "0")))
        self.after(NODE_LEASE_S / 3, self._greet)

    def _arrives(self, node: int, frame: bytes) -> None:
        if not self._down:
            self.listener.arrived.append((f"node{node}#1".encode(), [frame]))

    def upward(self, worker: SimulatedWorker, message: Upward) -> None:
        if worker.join.node not in self.cut:
            super().upward(worker, message)

    def _deliver(self, message: Upward) -> None:
        self._arrives(int(message.worker.partition("/")[0].removeprefix("node")), encode(message))

    def downward(self, incarnation: int, frame: bytes) -> None:
        """Carry an answer to its worker; those to local servers end here."""
        message: Any = decode(frame)
        target = next((w for w in self.workers if w.incarnation == incarnation), None)
        if target is None or target.state == "gone" or target.join.node in self.cut:
            return
        if isinstance(message, Go | Stop) and message.round is not None:  # whole again, as the client's is
            message = replace(message, round=self.rounds[message.round.id])
        whole = encode(message)
        self.transmit(lambda: target.hears(whole), downward=True)

    def _keep(self) -> None:
        """The server itself keeps its journal."""

    def _saved_members(self) -> list[dict[str, Any]]:
        assert self.journal.state is not None
        return list(json.loads(self.journal.state)["members"])

    def _tick(self) -> None:
        if not self._down and not self.state.over:
            self.server.turn(self.now)
        self.after(TICK_S, self._tick)

    def _restart(self) -> None:
        assert self.journal.state is not None
        state = restore(json.loads(self.journal.state), self.now)
        state.book.elections = list(self.journal.elections)
        self._down, self._started_at = False, self.now
        self._serve(Coordinator(state))

    def forget(self) -> None:
        """Be killed, and come back without the journal: as another run."""
        self._restart = self._serve_anew  # type: ignore[method-assign]
        self.kill()

    def _serve_anew(self) -> None:
        self._down = False
        self._serve(Coordinator(RunState(self.plan, "another")))

    def until(self, condition: Any, within_s: float = 600.0) -> float:
        """Let time pass until a condition holds; return how long that took."""
        began = self.now
        while not condition():
            assert self._events and self.now < began + within_s, self._story()
            self._step()
        return self.now - began

    def trains(self, iterations: int) -> float:
        """Let so many more iterations be counted."""
        wanted = self.state.ledger.count + iterations
        return self.until(lambda: self.state.ledger.count >= wanted)
