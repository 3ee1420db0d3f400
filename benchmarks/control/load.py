"""Asks a global server for iterations as fast as it answers: one process that speaks as a node's local server does.

Prints a line when all its workers are past the first round, and then as JSON how many requests were answered in how
many seconds. No worker ever has more than one request under way. With --standby it offers to serve the run, and gets
copies of the journal.
"""

import argparse
import json
import time
from collections.abc import Iterator

from benchmarks.control.worker import greeting
from lsgd.protocol.messages import (
    PROTOCOL,
    Completed,
    Copy,
    Go,
    Heartbeat,
    NodeHello,
    NodeWelcome,
    Request,
    Stop,
    Welcome,
    decode,
    encode,
    kind_of,
    worker_name,
)
from lsgd.protocol.sockets import Connector, wait_for
from lsgd.server.copies import HeldCopy

START_WITHIN_S = 60.0
WARM_UP_S = 0.3
HEARTBEAT_S = 1.0


class Node:
    """The workers of one node, on one connection to the global server.

    Args:
        address: of the global server.
        node: its index.
        workers: how many.
        place: where it offers to serve; empty: nowhere.
    """

    def __init__(self, address: str, node: int, workers: int, place: str = "") -> None:
        self._node, self._place, self._copy = node, place, HeldCopy()
        self._link = Connector(address, f"node{node}#1".encode())
        self._names = {node * workers + index + 1: worker_name(node, index) for index in range(workers)}
        self._seqs = dict.fromkeys(self._names, 0)
        self._committed = dict.fromkeys(self._names, 0)
        self._beat_at = 0.0

    def start(self) -> None:
        """Join with all workers, and return when each has completed the first round and asked again.

        Raises:
            TimeoutError: not within a minute.
        """
        deadline = time.monotonic() + START_WITHIN_S
        joins = [encode(greeting(self._node, index, one)) for index, one in enumerate(self._names)]
        welcome = False
        while not all(self._committed.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no first round of all workers within {START_WITHIN_S:g} s")
            if not welcome:
                self._link.send([self._hello()])
            for incarnation, frame in self._answers(timeout_s=0.2):
                match decode(frame):
                    case NodeWelcome() if not welcome:
                        welcome = True
                        self._link.send(joins)
                    case Welcome() if not self._seqs[incarnation]:
                        self._link.send([self._ask(incarnation)])
                    case Go(_, round):  # without one, if it was quicker than the first rounds of others
                        if round is not None:
                            self._committed[incarnation] = round.id
                            name = self._names[incarnation]
                            self._link.send([encode(Completed(name, incarnation, round.id))])
                        self._link.send([self._ask(incarnation)])

    def serve(self, seconds: float) -> int:
        """Answer every Go with the next request for so long, and return how many were answered."""
        answered, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            asks = []
            for incarnation, frame in self._answers(timeout_s=0.1):
                if kind_of(frame) is Stop:
                    raise RuntimeError("the run has ended under the load")
                if kind_of(frame) is Go:
                    asks.append(self._ask(incarnation))
            answered += len(asks)
            if asks:
                self._link.send(asks)
        return answered

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _answers(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield the incarnation (0: none) and the frame of each answer; keep the leases alive."""
        if time.monotonic() - self._beat_at > HEARTBEAT_S:
            beats = [encode(Heartbeat(name, incarnation)) for incarnation, name in self._names.items()]
            self._link.send([self._hello(), *beats])
            self._beat_at = time.monotonic()
        wait_for(timeout_s, self._link)
        for frames in self._link.receive():
            for peer, frame in zip(frames[::2], frames[1::2], strict=True):
                if kind_of(frame) is Copy and isinstance(copy := decode(frame), Copy):
                    self._copy.store(copy)
                yield int(peer or 0), frame

    def _hello(self) -> bytes:
        return encode(NodeHello(PROTOCOL, self._node, 1, "load", "0", 0, self._place, self._copy.copied))

    def _ask(self, incarnation: int) -> bytes:
        self._seqs[incarnation] += 1
        seq = self._seqs[incarnation]
        committed = self._committed[incarnation]
        made = seq - 1  # the answer to each request but this one was an iteration
        return encode(Request(self._names[incarnation], incarnation, seq, made, committed, 0, 0.5))


def main() -> None:
    """Load the server, and print how many requests it answered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("node", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--standby", action="store_true")
    given = parser.parse_args()
    node = Node(given.address, given.node, given.workers, "tcp://127.0.0.1:1" if given.standby else "")
    node.start()
    node.serve(WARM_UP_S)
    print("started", flush=True)
    start = time.monotonic()
    answered = node.serve(given.seconds)
    print(json.dumps({"requests": answered, "seconds": time.monotonic() - start}), flush=True)
    node.close()


if __name__ == "__main__":
    main()
