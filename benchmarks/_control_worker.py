"""Workers that iterate in a set time and note how long each answer takes: one process of benchmarks/control.py.

With ``--channel`` it is one worker that asks through the client's own Channel, whose thread is then a part of the
round trip; else several, each on a socket of its own, in one loop, which stand for as many processes.
"""

import argparse
import heapq
import itertools
import json
import random
import time
from typing import Any

from lsgd.messages import PROTOCOL, Done, Go, Heartbeat, Join, Leave, Request, Round, Welcome, decode, encode
from lsgd.sockets import Link, Poller

START_WITHIN_S = 60.0
HEARTBEAT_S = 1.0
SPREAD = 0.1


def greeting(node: int, index: int, incarnation: int) -> Join:
    """Return the greeting of a worker."""
    versions = {"lsgd": "0", "torch": "0", "cuda": "", "nccl": ""}
    place = (f"node{node}/worker{index}", incarnation, node, index)
    return Join(PROTOCOL, *place, versions, "digest", "a model", "", "127.0.0.1")


class SocketWorker:
    """One worker on a socket of its own; it never waits.

    Args:
        address: of the local server.
        join: its greeting.
    """

    def __init__(self, address: str, join: Join) -> None:
        self.link = Link(address, str(join.incarnation).encode())
        self.round_trips_s: list[float] = []
        self.iterating = False
        self._join = join
        self._seq = self._committed = 0
        self._said = encode(join)
        self._asked_at = 0.0

    def ask(self) -> None:
        """Ask for the next iteration; the last one is made."""
        self.iterating = False
        self._seq += 1
        who = (self._join.worker, self._join.incarnation)
        self._said = encode(Request(*who, self._seq, self._seq - 1, self._committed, 0, 0.5))
        self._asked_at = time.perf_counter()
        self.link.send([self._said])

    def say_again(self) -> None:
        """Repeat what has no answer yet, and say that the process lives."""
        beat = encode(Heartbeat(self._join.worker, self._join.incarnation))
        self.link.send([beat] if self.iterating else [self._said, beat])

    def receive(self) -> None:
        """Take in what has come."""
        for frames in self.link.receive():
            for frame in frames:
                self._take(decode(frame))

    def _take(self, message: Any) -> None:
        match message:
            case Welcome() if not self._seq:
                self.ask()
            case Go(seq, round) if seq == self._seq and not self.iterating:
                self.iterating = True
                if round is None:
                    self.round_trips_s.append(time.perf_counter() - self._asked_at)
                else:
                    self._commit(round)

    def _commit(self, round: Round) -> None:
        self._committed = round.id
        self.link.send([encode(Done(self._join.worker, self._join.incarnation, round.id, True, ""))])

    def leave(self) -> None:
        """Give the last grant back, and go."""
        made = self._seq - 1
        who = (self._join.worker, self._join.incarnation)
        self.link.send([encode(Leave(*who, made, False, "measured", self._committed))])
        self.link.close()


def by_sockets(address: str, joins: list[Join], step_s: float, seconds: float) -> list[float]:
    """Let several workers iterate for so long, and return their round trips in seconds."""
    workers = [SocketWorker(address, join) for join in joins]
    poller = Poller(*(worker.link for worker in workers))
    chance, order = random.Random(joins[0].incarnation), itertools.count()
    due: list[tuple[float, int, SocketWorker]] = []
    busy: set[SocketWorker] = set()
    started_at, said_at = None, 0.0
    deadline = time.monotonic() + START_WITHIN_S
    while started_at is None or time.monotonic() < started_at + seconds:
        now = time.monotonic()
        if started_at is None and now > deadline:
            raise TimeoutError(f"no first round within {START_WITHIN_S:g} s")
        if now - said_at > HEARTBEAT_S:
            for worker in workers:
                worker.say_again()
            said_at = now
        while due and due[0][0] <= now:
            worker = heapq.heappop(due)[2]
            busy.remove(worker)
            worker.ask()
        poller.wait(min(0.05, due[0][0] - now) if due else 0.05)
        for worker in workers:
            worker.receive()
            if worker.iterating and worker not in busy:
                busy.add(worker)
                takes_s = step_s * chance.uniform(1 - SPREAD, 1 + SPREAD)
                heapq.heappush(due, (time.monotonic() + takes_s, next(order), worker))
        if started_at is None and len(busy) == len(workers):
            started_at = time.monotonic()
            for worker in workers:
                worker.round_trips_s.clear()
    for worker in workers:
        worker.leave()
    return [seconds for worker in workers for seconds in worker.round_trips_s]


def by_channel(address: str, join: Join, step_s: float, seconds: float) -> list[float]:
    """Let one worker iterate for so long through the client's channel, and return its round trips in seconds."""
    from lsgd.client.channel import Channel

    channel = Channel(address, join.incarnation, START_WITHIN_S)
    channel.start_heartbeat(join.worker)
    channel.ask(join, lambda m: isinstance(m, Welcome), what="joining", timeout_s=START_WITHIN_S)
    chance = random.Random(join.incarnation)
    who, committed, round_trips_s = (join.worker, join.incarnation), 0, []
    end = None
    for seq in itertools.count(1):
        start = time.perf_counter()
        request = Request(*who, seq, seq - 1, committed, 0, 0.5)
        go = channel.ask(request, lambda m, seq=seq: isinstance(m, Go) and m.seq == seq, what="asking")
        if go.round is not None:
            committed = go.round.id
            channel.send(Done(*who, committed, True, ""))
        else:
            round_trips_s.append(time.perf_counter() - start)
        end = end or time.monotonic() + seconds
        if time.monotonic() > end:
            break
        time.sleep(step_s * chance.uniform(1 - SPREAD, 1 + SPREAD))
    channel.send(Leave(*who, seq - 1, False, "measured", committed))
    channel.close()
    return round_trips_s


def main() -> None:
    """Print the round trips in seconds as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="of the node's local server")
    parser.add_argument("node", type=int)
    parser.add_argument("first", type=int, help="index of the first worker")
    parser.add_argument("workers", type=int)
    parser.add_argument("step_s", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--channel", action="store_true")
    given = parser.parse_args()
    joins = [
        greeting(given.node, index, 1000 * given.node + index + 1)
        for index in range(given.first, given.first + given.workers)
    ]
    if given.channel:
        found = by_channel(given.address, joins[0], given.step_s, given.seconds)
    else:
        found = by_sockets(given.address, joins, given.step_s, given.seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
