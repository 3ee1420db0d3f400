"""Workers that iterate in a set time and note how long they wait for the next: one process of benchmarks/control.

With ``--channel`` it is one worker that asks through the client's own Channel, whose thread is then a part of what it
waits for; else several, each on a socket of its own, in one loop, which stand for as many processes. They ask ahead
as client/iteration/steps.py does.
"""

import argparse
import heapq
import itertools
import json
import logging
import random
import time
from typing import Any

from lsgd import __version__
from lsgd.client.iteration.grants import GrantedIterations
from lsgd.protocol.messages import (
    PROTOCOL,
    Completed,
    Go,
    Heartbeat,
    Join,
    Leave,
    Request,
    Round,
    Welcome,
    decode,
    encode,
    worker_name,
)
from lsgd.protocol.sockets import Connector, wait_for
from lsgd.protocol.wants import STEP, More

START_WITHIN_S = 60.0
HEARTBEAT_S = 1.0
SPREAD = 0.1


def greeting(node: int, index: int, incarnation: int, address: str = "127.0.0.1") -> Join:
    """Return the greeting of a worker, whose node has this address."""
    versions = {"lsgd": __version__, "torch": "0", "cuda": "", "nccl": ""}
    place = (worker_name(node, index), incarnation, node, index)
    return Join(PROTOCOL, *place, versions, "digest", "a model", "", address)


class SocketWorker:
    """One worker on a socket of its own, in a loop that never waits for it alone.

    Args:
        address: of the local server.
        join: its greeting.
        lookahead: iterations that it asks for ahead.
    """

    def __init__(self, address: str, join: Join, lookahead: int) -> None:
        self.link = Connector(address, str(join.incarnation).encode())
        self.waits_s: list[float] = []
        self.iterating = False
        self._join = join
        self._grants = GrantedIterations(lookahead)
        self._committed = self._done = 0
        self._said = encode(join)
        self._asked_at = 0.0

    def go_on(self) -> None:
        """An iteration is made: begin the next one, or ask for it."""
        self._done += 1
        self._next()

    def _next(self) -> None:
        if self._grants.next():
            self.waits_s.append(0.0)
            self._ask_ahead()
            return
        self.iterating = False
        self._asked_at = time.perf_counter()
        self._said = self._request(self._grants.seq)
        self.link.send([self._said])

    def _ask_ahead(self) -> None:
        if self._grants.wants_more():
            self.link.send([self._request(self._grants.seq + 1, ahead=True)])

    def _request(self, seq: int, *, ahead: bool = False) -> bytes:
        who = (self._join.worker, self._join.incarnation)
        return encode(Request(*who, seq, self._done, self._committed, 0, 0.5, More() if ahead else STEP))

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
            case Welcome() if not self._grants.seq:
                self._next()
            case Go(seq, round) if (seq > self._grants.seq or not self.iterating) and self._grants.take(message):
                self.iterating = True
                if round is None:
                    self.waits_s.append(time.perf_counter() - self._asked_at)
                else:
                    self._commit(round)
                self._ask_ahead()

    def _commit(self, round: Round) -> None:
        self._committed = round.id
        self.link.send([encode(Completed(self._join.worker, self._join.incarnation, round.id))])

    def leave(self) -> None:
        """Give back what is granted and not made, and go."""
        who = (self._join.worker, self._join.incarnation)
        self.link.send([encode(Leave(*who, self._done, False, "measured", self._committed))])
        self.link.close()


def by_sockets(address: str, joins: list[Join], step_s: float, seconds: float, lookahead: int) -> list[float]:
    """Let several workers iterate for so long, and return their waits in seconds."""
    workers = [SocketWorker(address, join, lookahead) for join in joins]
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
            worker.go_on()
        wait_for(min(0.05, due[0][0] - now) if due else 0.05, *(worker.link for worker in workers))
        for worker in workers:
            worker.receive()
            if worker.iterating and worker not in busy:
                busy.add(worker)
                takes_s = step_s * chance.uniform(1 - SPREAD, 1 + SPREAD)
                heapq.heappush(due, (time.monotonic() + takes_s, next(order), worker))
        if started_at is None and len(busy) == len(workers):
            started_at = time.monotonic()
            for worker in workers:
                worker.waits_s.clear()
    for worker in workers:
        worker.leave()
    return [seconds for worker in workers for seconds in worker.waits_s]


def by_channel(address: str, join: Join, step_s: float, seconds: float, lookahead: int) -> list[float]:
    """Let one worker iterate for so long through the client's channel, and return its waits in seconds."""
    from lsgd.client.control.channel import Channel
    from lsgd.client.control.waiting import Expected

    def expect(seq: int) -> Expected:
        return channel.expect(lambda m: isinstance(m, Go) and m.seq == seq)

    channel = Channel(address, join.incarnation, START_WITHIN_S)
    channel.signs.live_as(join.worker)
    channel.ask(join, lambda m: isinstance(m, Welcome), what="joining", timeout_s=START_WITHIN_S)
    chance = random.Random(join.incarnation)
    who, waits_s = (join.worker, join.incarnation), []
    grants, ahead, end = GrantedIterations(lookahead), None, None
    done = committed = 0
    while end is None or time.monotonic() < end:
        start = time.perf_counter()
        if ahead is not None and ahead.answered is not None:
            channel.forget(ahead)
            grants.take(ahead.answered)
            ahead = None
        round = None
        if not grants.next():
            expected = ahead or expect(grants.seq)
            go = channel.ask(Request(*who, grants.seq, done, committed, 0, 0.5), expected, what="asking")
            grants.take(go)
            ahead, round = None, go.round
        if round is not None:
            committed = round.id
            channel.send(Completed(*who, committed))
        else:
            waits_s.append(time.perf_counter() - start)
        if grants.wants_more():
            ahead = expect(grants.seq + 1)
            channel.send(Request(*who, grants.seq + 1, done, committed, 0, None, More()))
        end = end or time.monotonic() + seconds
        time.sleep(step_s * chance.uniform(1 - SPREAD, 1 + SPREAD))
        done += 1
    channel.send(Leave(*who, done, False, "measured", committed))
    channel.close()
    return waits_s


def main() -> None:
    """Print the waits in seconds as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="of the node's local server")
    parser.add_argument("node", type=int)
    parser.add_argument("first", type=int, help="index of the first worker")
    parser.add_argument("workers", type=int)
    parser.add_argument("step_s", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--lookahead", type=int, default=0)
    parser.add_argument("--channel", action="store_true")
    given = parser.parse_args()
    logging.getLogger("lsgd").setLevel(logging.ERROR)  # that the others leave at the end is no news
    joins = [
        greeting(given.node, index, 1000 * given.node + index + 1)
        for index in range(given.first, given.first + given.workers)
    ]
    if given.channel:
        found = by_channel(given.address, joins[0], given.step_s, given.seconds, given.lookahead)
    else:
        found = by_sockets(given.address, joins, given.step_s, given.seconds, given.lookahead)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
