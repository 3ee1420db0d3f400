"""What the coordinator's tests share: greetings, a bench that speaks for workers, and the invariants of its state."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lsgd import __version__
from lsgd.algorithms.leader import LeaderSettings
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol import wants
from lsgd.protocol.messages import (
    PROTOCOL,
    Completed,
    Data,
    Downward,
    Failed,
    Go,
    Heartbeat,
    Join,
    Leave,
    Pause,
    Probed,
    Refused,
    Request,
    Round,
    Stop,
    Waiting,
    Welcome,
)
from lsgd.server.coordinator import Coordinator
from lsgd.server.ledger import Ledger
from lsgd.server.next_step import choose, waits_for
from lsgd.server.reasons import Reason
from lsgd.server.roster import MemberState, Roster
from lsgd.server.rounds import RoundBook
from lsgd.server.scheduler import queue_of
from lsgd.server.state import Decision, RunState
from lsgd.server.waits import Wait
from lsgd.settings import AlgorithmSettings, Schedule

from .invariants import KeptState, check_state


class Lockstep(AlgorithmSettings):
    """An algorithm for which every iteration is a round."""

    name = "lockstep"

    def schedule(self) -> Schedule:
        return Schedule(1, 1, lockstep=True)


def make_plan(
    *, period: int = 8, local_period: int = 4, algorithm: AlgorithmSettings | None = None, **run: object
) -> Plan:
    return Plan(
        RunSettings(**run),  # type: ignore[arg-type]
        (PlanPhase(algorithm or LeaderSettings(period=period, local_period=local_period, election="loss")),),
    )


def greeting(node: int, index: int, incarnation: int = 1, **changes: object) -> Join:
    join = Join(
        protocol=PROTOCOL,
        worker=f"node{node}/worker{index}",
        incarnation=incarnation,
        node=node,
        index=index,
        versions={"lsgd": __version__, "torch": "2.13.0", "cuda": "", "nccl": ""},
        model="m",
        model_summary="2 tensors, 12 numbers",
        gpu="",
        address=f"10.0.0.{node + 1}",
    )
    return replace(join, **changes)  # type: ignore[arg-type]


def nccl(*places: str) -> "Bench":
    """Return a bench with workers that have a GPU each, over NCCL."""
    bench = Bench(workers=len(places), transport="nccl")
    for place in places:
        bench.join(place, gpu=f"GPU {place}")
    return bench


class Bench:
    """A coordinator with a clock, and one call for everything that a worker can say.

    Workers are named ``"01"``: the worker 1 of node 0. :attr:`got` has the answers of the last call by that name,
    :attr:`transfers` what their heartbeats say of a transfer.
    """

    def __init__(self, *places: str, plan: Plan | None = None, **settings: object) -> None:
        self.coordinator = Coordinator(
            RunState(plan or make_plan(**{"workers": max(len(places), 1), **settings}), "run")  # type: ignore[arg-type]
        )
        self.now = 100.0
        self.kept = KeptState()
        self.got: dict[str, list[Downward]] = {}
        self.notes: list[Reason] = []
        self.seqs: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.committed: dict[str, int] = {}
        self.incarnations: dict[str, int] = {}
        self.transfers: dict[str, str] = {}
        for place in places:
            self.join(place)

    @property
    def state(self) -> RunState:
        return self.coordinator.state

    @property
    def roster(self) -> Roster:
        return self.state.roster

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def book(self) -> RoundBook:
        return self.state.book

    @property
    def codes(self) -> list[str]:
        """The codes of what the last call told people."""
        return [note.code for note in self.notes]

    def waits(self, after_s: float = 0.0) -> str:
        """Return the code of what is waited for."""
        return waits_for(self.state, self.now + after_s).code

    def act(self, decision: Decision) -> dict[str, list[Downward]]:
        check_invariants(self.state)
        self.kept.check(self.state)
        self.notes = decision.notes
        self.got = {}
        for worker, incarnation, message in decision.answers:
            place = worker[4] + worker[-1]
            assert incarnation == self.incarnations.get(place, incarnation)
            self.got.setdefault(place, []).append(message)
        return self.got

    def say(self, message: object) -> dict[str, list[Downward]]:
        return self.act(self.coordinator.handle(message, self.now))  # type: ignore[arg-type]

    def tick(self, after_s: float = 0.0) -> dict[str, list[Downward]]:
        """Let time pass in steps as a daemon does, with everybody's heartbeats; keep all that the ticks decide."""
        end, whole = self.now + after_s, Decision()
        while True:
            beats = [Heartbeat(*self.who(p), transfer=self.transfers.get(p, "")) for p in self.incarnations]
            decisions = [self.coordinator.handle(beat, self.now) for beat in beats]
            for decision in [*decisions, self.coordinator.tick(self.now)]:
                whole.answers += decision.answers
                whole.notes += decision.notes
                whole.happened += decision.happened
            if self.now >= end:
                return self.act(whole)
            self.now = min(end, self.now + 1.0)

    def transfer(self, place: str, seconds: int) -> None:
        """Let time pass while a worker says every second that more bytes of a transfer have moved."""
        for moved in range(seconds):
            self.transfers[place] = f"{moved}.0 of 4000.0 MB with node0/worker0 at 8.00 Mbit/s"
            self.tick(1.0)

    def join(self, place: str, incarnation: int = 1, **changes: object) -> dict[str, list[Downward]]:
        self.incarnations[place] = incarnation
        self.seqs[place] = self.done[place] = self.committed[place] = 0
        return self.say(greeting(int(place[0]), int(place[1]), incarnation, **changes))

    def who(self, place: str) -> tuple[str, int]:
        return f"node{place[0]}/worker{place[1]}", self.incarnations[place]

    def heartbeat(self, place: str) -> dict[str, list[Downward]]:
        return self.say(Heartbeat(*self.who(place)))

    def ask(
        self,
        place: str,
        *,
        did: bool = True,
        loss: float | None = None,
        same: bool = False,
        dropped: int = 0,
        wants: wants.Want = wants.STEP,
        **more: object,
    ) -> dict[str, list[Downward]]:
        """Ask for the next iteration, having done the last; or, with ``same``, again for the same one."""
        if not same:
            self.done[place] += did and self.seqs[place] > 0
            self.seqs[place] += 1
        return self.say(
            Request(
                *(*self.who(place), self.seqs[place], self.done[place], self.committed[place], dropped, loss, wants),
                **more,  # type: ignore[arg-type]
            )
        )

    def ask_ahead(self, place: str, *, did: int = 0) -> Go | None:
        """Ask for more while an iteration is to be made, having done ``did`` since the last word; return the grant."""
        self.done[place] += did
        seq = self.seqs[place] + 1
        progress = (self.done[place], self.committed[place], 0)
        self.say(Request(*self.who(place), seq, *progress, None, wants=wants.More()))
        for answer in self.got.get(place, []):
            assert isinstance(answer, Go) and answer.round is None and answer.seq == seq
            self.seqs[place] = seq
            return answer
        return None

    def ask_all(self, *places: str, **losses: float) -> dict[str, list[Downward]]:
        for place in places:
            self.ask(place, loss=losses.get(f"w{place}"))
        return self.got

    def complete(
        self, place: str, round: int, *, lacking: bool = False, transfer_s: float = 0.0
    ) -> dict[str, list[Downward]]:
        self.committed[place] = round
        order = self.member(place).round
        if order and order.round.id == round and order.round.probe:
            self.say(Probed(*self.who(place), round, ()))
        return self.say(Completed(*self.who(place), round, lacking=lacking, transfer_s=transfer_s))

    def complete_all(self, *places: str, transfer_s: float = 0.0) -> None:
        for place in places:
            member = self.member(place)
            assert member.round is not None
            self.complete(place, member.round.round.id, transfer_s=transfer_s)

    def fail(
        self, place: str, round: int, error: str = "peer closed", broken: tuple[int, ...] = ()
    ) -> dict[str, list[Downward]]:
        return self.say(Failed(*self.who(place), round, error, broken))

    def pause(self, place: str, *, did: bool = True) -> dict[str, list[Downward]]:
        self.done[place] += did
        return self.say(Pause(*self.who(place), self.seqs[place], self.done[place], self.committed[place]))

    def leave(
        self, place: str, *, did: bool = False, failed: bool = False, reason: str = "done"
    ) -> dict[str, list[Downward]]:
        self.done[place] += did
        return self.say(Leave(*self.who(place), self.done[place], failed, reason, self.committed[place]))

    def data(self, place: str, digest: str, data: str = "", noise: str = "") -> dict[str, list[Downward]]:
        return self.say(Data(*self.who(place), digest, data, noise))

    def member(self, place: str):  # type: ignore[no-untyped-def]
        return self.roster.members[self.who(place)[0]]

    def only(self, place: str) -> Downward:
        """Return the single answer that the last call gave to a worker."""
        (answer,) = self.got[place]
        return answer

    def round_of(self, place: str) -> Round:
        """Return the round that the last call gave to a worker, whatever else it told it."""
        (round,) = rounds_in(self.got[place])
        return round

    def round(self, *places: str) -> Round:
        """Return the round that the last call gave to exactly these workers, the same to all."""
        answers = {place: self.only(place) for place in self.got}
        rounds = {p: a.round for p, a in answers.items() if isinstance(a, Go | Stop) and a.round is not None}
        assert sorted(rounds) == sorted(places), rounds
        assert len({id(r) for r in rounds.values()}) == 1
        return next(iter(rounds.values()))


def started(*places: str, **settings: object) -> Bench:
    """Return a run whose first round all have completed."""
    bench = Bench(*places, **settings)
    bench.ask_all(*places)
    bench.complete_all(*places)
    return bench


def check_invariants(state: RunState) -> None:
    """Check what must hold between two messages, and that whoever can be answered has been."""
    check_state(state)
    _check_generation(state)
    _check_nobody_waits_in_vain(state)
    step = choose(state)
    assert isinstance(step, Wait), step  # what was due has been carried out
    waits = step.why(state, 0.0)
    assert waits and not re.search(r" for[ :,]*[:;,]|  ", waits), waits  # it names somebody


def _check_generation(state: RunState) -> None:
    roster, everybody = state.roster, list(state.roster.members.values())
    inside = [m for m in everybody if m.rank >= 0]
    if roster.generation is None:
        assert not inside and not roster.queues and not roster.broken
        return
    assert len({m.rank for m in inside}) == len(inside)
    if not roster.broken and not any(m.state is MemberState.ENDED for m in inside):
        gone = set(roster.generation.members) - {m.worker for m in inside}
        assert not gone or any(m.leaving for m in everybody) or roster.absent
    assert tuple(len(g.members) for g in roster.queues.values()) == roster.generation.node_sizes


def _check_nobody_waits_in_vain(state: RunState) -> None:
    """No held request could be answered now."""
    roster, tokens, everybody = state.roster, state.ledger.tokens, list(state.roster.members.values())
    for member in everybody:
        group = queue_of(state, member)
        if member.held and member.synced and group and member.iterates and not state.phases.schedule.lockstep:
            assert tokens < 1 or group.tokens < 1
        if member.held or member.state is MemberState.CUT:
            assert not state.closed
    if not roster.broken and not roster.absent:
        for group in roster.queues.values():
            complete = group.held == len(group.members) and group.tokens < 1
            assert not complete or tokens < len(group.members)


@contextmanager
def as_a_user_without_rights(folder: Path) -> Iterator[None]:
    """Be nobody for a while, if this is root, who may do anything."""
    if os.geteuid() != 0:
        yield
        return
    for parent in [folder, *folder.parents]:
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(parent.stat().st_mode | 0o005)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def rounds_in(messages: Iterable[Downward]) -> list[Round]:
    return [m.round for m in messages if isinstance(m, Go | Stop) and m.round is not None]


__all__ = [
    "Bench",
    "Lockstep",
    "Refused",
    "Waiting",
    "Welcome",
    "as_a_user_without_rights",
    "check_invariants",
    "greeting",
    "make_plan",
    "rounds_in",
    "started",
]
