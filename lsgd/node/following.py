"""Which server a node follows, and when it serves its run itself: what it hears becomes events of its allegiance."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lsgd import __version__
from lsgd.node.allegiance import Allegiance, Event, State
from lsgd.node.candidates import LOOK_AFTER_S, Candidates, Link, met
from lsgd.node.uplink import HELLO_EVERY_S, SILENT_AFTER_S, Uplink
from lsgd.node.workers import Lines, Workers
from lsgd.protocol.messages import PROTOCOL, Endpoint, Moved, NodeHello, NodeWelcome, Term, WorkerHelloReply, encode
from lsgd.server import succession
from lsgd.server.copies import HeldCopy
from lsgd.server.succession import Move

SERVE_AGAIN_S = 5.0
"""After how long a node that could not take over tries again, if no other one has."""


@dataclass(frozen=True)
class Identity:
    """Who a local server is.

    Args:
        incarnation: random number that its process drew.
        workers: number of workers on the node.
        place: address where the node could start a global server; empty: nowhere.
    """

    node: int
    incarnation: int
    workers: int
    place: str

    def hello(self, copied: int, stage: int, *, looks: bool) -> NodeHello:
        """Return a greeting."""
        who = PROTOCOL, self.node, self.incarnation, socket.gethostname(), __version__, self.workers
        return NodeHello(*who, self.place, copied, looks=looks, stage=stage)


class Following:
    """Follows a server of a later term, brings two parts of the run together, and notices that its node has to serve.

    Args:
        who: the node.
        uplink: the connection to the server that it follows.
        candidates: the other places of the run.
        allegiance: of the node, as it begins.
        workers: those of the node.
        lines: prints.
        when_moved: called with the place of the server that this node follows, and then those where it may be later.
        clock: returns seconds that never go back.

    Attributes:
        allegiance: whom this node follows, and whether its own servers serve the run.
        copy: of the global server's journal, if this node is a standby.
        relay: address of the relay, and the proof for it, as last heard.
    """

    def __init__(
        self,
        who: Identity,
        uplink: Uplink,
        candidates: Candidates,
        allegiance: Allegiance,
        workers: Workers,
        lines: Lines,
        when_moved: Callable[[Sequence[Endpoint]], None],
        clock: Callable[[], float],
    ) -> None:
        self._who, self.uplink, self.candidates, self.allegiance = who, uplink, candidates, allegiance
        self._workers, self._lines, self._clock = workers, lines, clock
        self._when_moved, self._told = when_moved, list[Endpoint]()
        self.copy = HeldCopy()
        self.relay = ("", b"")

    def upon(self, event: Event, stranger: str = "") -> None:
        """Let something happen to whom this node follows; its owner knows what happens to its servers."""
        self.allegiance = self.allegiance.upon(event, self._clock(), stranger)

    def next_terms(self) -> tuple[Term, ...]:
        """Return the terms of the run with the one in which this node serves next."""
        return succession.successor(self.candidates.terms, self._who.node)

    @property
    def places(self) -> list[Endpoint]:
        """Where the run is served, and then where it may be later."""
        served, *others = self.candidates.places
        return [replace(served, address=self.uplink.address), *others]

    @property
    def here(self) -> WorkerHelloReply:
        """What a worker is told of this node and its run."""
        return WorkerHelloReply(self._who.node, self.uplink.address, *self.relay)

    def hello(self, stage: int, *, looks: bool) -> NodeHello:
        """Return a greeting for the server that this node follows, or one at which it ``looks``."""
        return self._who.hello(self.copy.copied, stage, looks=looks)

    def greeting(self, stage: int) -> NodeHello:
        """Return the one that is due: a node that looks for its run, or takes over, follows nobody."""
        return self.hello(stage, looks=bool(self.allegiance.stranger) or self.allegiance.state is State.CLAIMING)

    def away(self, now: float) -> str:
        """Return a line about a global server that does not answer, or an empty text if it does."""
        return self.uplink.away(now, self.allegiance, self.candidates.standbys)

    def silence(self, now: float) -> str:
        """Return a line about how long it has been silent, and what to do."""
        return self.uplink.silence(now, self.allegiance, self.candidates.standbys)

    def complain(self, now: float) -> bool:
        """Print now and then that it does not answer; return whether that is so now."""
        if line := self.uplink.complaint(now, self.allegiance, self.candidates.standbys):
            self._lines.complain(line)
        return bool(line)

    def close(self) -> None:
        """End the connections to global servers: to the one that this node follows, and to others."""
        self.candidates.close()
        self.uplink.link.close()

    def look(self, now: float, stage: int) -> None:
        """Look at the other places.

        While this node's own server answers, it alone decides what follows from another one.
        """
        silent_s, candidates = self.uplink.silent_s(now), self.candidates
        self.allegiance = self.allegiance.at(now, silent_s, LOOK_AFTER_S)
        state, could_serve = self.allegiance.state, bool(self._who.place and self.copy.number)
        looks_s = max(silent_s, LOOK_AFTER_S) if state.searches else silent_s
        for place, link, welcome in list(candidates.hear(now, looks_s, self.hello(stage, looks=True))):
            moves = succession.move(candidates.term, welcome.terms)
            if candidates.run and welcome.run != candidates.run:
                moves = Move.ANEW if welcome.run == candidates.other else Move.STAY
            if place.node == self._who.node and not self._is_to_serve(now):
                continue
            if state is not State.SERVING or silent_s >= SILENT_AFTER_S:
                # Where nobody has the model, this node does not go: it may have it, and can serve.
                if moves is Move.CONTINUE or (moves is Move.ANEW and (welcome.count > 0 or not could_serve)):
                    self._follow(place, link, welcome, now, anew=moves is Move.ANEW)
                    return
            elif moves is Move.STAY:
                link.send([encode(candidates.mine())])
            else:
                self.uplink.send([encode(met(welcome, place))])
        if could_serve:
            self._claim(now, silent_s)

    def _claim(self, now: float, silent_s: float) -> None:
        """Take over if it is this node's turn; no more if the old server's host has answered since."""
        before, candidates, address, node = self.allegiance, self.candidates, self.uplink.address, self._who.node
        if before.state is State.CLAIMING:
            if not before.stranger and candidates.answers(now, before.since) and not candidates.is_next(silent_s, True):
                self.upon(Event.VAIN)
                self._lines.complain(f"the host of {address} answers: node{node} does not take over yet")
            return
        waits = before.state is State.UNABLE and now - before.since < SERVE_AGAIN_S
        if waits or not before.may(Event.DUE):
            return
        if not candidates.is_next(silent_s, False if before.stranger else candidates.answers(now)):
            return
        self.upon(Event.DUE)
        if before.state is not State.UNABLE:
            why = "serves another run" if before.stranger else f"has been silent for {silent_s:.0f} s"
            self._lines.complain(f"the global server at {address} {why}: node{node} takes over, at {self._who.place}")

    def _is_to_serve(self, now: float) -> bool:
        """Whether this node, whose server has come up, follows it, because the old one is still silent.

        The silence counts from the first missed greeting, and the last knock began when this node took over: so a link
        that was down for less time than a standby waits moves nobody.
        """
        claims, silent_s = self.allegiance, self.uplink.silent_s(now)
        if claims.state is not State.CLAIMING:
            return False
        answers = False if claims.stranger else self.candidates.answers(now, claims.since)
        return self.candidates.is_next(silent_s - HELLO_EVERY_S, answers)

    def _follow(self, place: Endpoint, link: Link, welcome: NodeWelcome, now: float, *, anew: bool) -> None:
        """Follow another server; ``anew``: the workers' work is not part of its run, so they join as newcomers."""
        node = self._who.node
        self.uplink.follow(link)
        self.candidates.take(place)
        self.upon(Event.UP if place.node == node else Event.FOLLOW)
        serves = f"node{node} serves the run from now on: it " * (place.node == node)
        term = welcome.terms[-1].number
        self._lines.complain(f"{serves}follows the global server at {link.address}, in term {term} of the run")
        if self.copy.number and not anew:
            link.send([encode(self.copy.offer())])
        if anew:
            reason = f"the run continues at node{place.node}, without what was learned here since the cut"
            self._workers.dismiss(reason, {self.candidates.run, welcome.run})
        self._welcomed(welcome, now)

    def _welcomed(self, welcome: NodeWelcome, now: float) -> None:
        self.candidates.welcomed(welcome, self.uplink.address)
        standbys = [place.node for place in welcome.places[1:]]
        if standbys and self._who.node not in standbys:  # a copy that gets old is worse than none
            self.copy = HeldCopy()
        if welcome.places and self.candidates.places != self._told:
            self._told = self.candidates.places
            self._when_moved(self.places)
        self.uplink.heard_at = now
        if welcome.relay and (welcome.relay, welcome.relay_secret) != self.relay:
            self.relay = welcome.relay, welcome.relay_secret
            self._workers.tell(self.here)

    def gives_way(self, moved: Moved) -> None:
        """Look where the run continues, because the server of this node has given up."""
        if self.allegiance.may(Event.GIVES_WAY):
            self._lines.complain(moved.reason)
        self.candidates.add(moved.place, moved.other)
        self.upon(Event.GIVES_WAY)

    def welcome(self, welcome: NodeWelcome, now: float) -> None:
        """Take a welcome from the server that this node follows, or from another one in its place."""
        if self._is_strange(welcome):
            return
        if welcome.run != self.candidates.run:
            self._lines.say(f"connected to the global server at {self.uplink.address}, run {welcome.run}")
        self._heard(welcome, now)

    def _is_strange(self, welcome: NodeWelcome) -> bool:
        """Whether a server has begun another run in its server's place, and this node can continue its own."""
        own, may = self.candidates.run, self.allegiance.may(Event.STRANGER)
        if own in ("", welcome.run) or not self.copy.number or not may:
            return False
        if not self.allegiance.stranger:
            self._lines.complain(
                f"the global server at {self.uplink.address} has begun another run ({welcome.run}): this node stays "
                f"in its own ({own})"
            )
        self.upon(Event.STRANGER, welcome.run)
        return True

    def _heard(self, welcome: NodeWelcome, now: float) -> None:
        """Note that the global server lives, unless it is one of an earlier term that was replaced."""
        same = welcome.run == self.candidates.run
        if same and welcome.terms and welcome.terms[-1] < self.candidates.term:
            return
        claims = self.allegiance.state is State.CLAIMING
        own = claims and bool(welcome.terms) and welcome.terms[-1].node == self._who.node  # it has served here before
        if own and not self._is_to_serve(now):
            return
        anew = same and succession.move(self.candidates.term, welcome.terms) is Move.ANEW
        self.upon(Event.UP if own else Event.WELCOME)
        if claims and not own:
            address = self.uplink.address
            self._lines.complain(f"the global server at {address} answers again: it serves the run as before")
        self._welcomed(welcome, now)
        if anew:
            reason = f"the global server at {self.uplink.address} continues another part of the run"
            self._workers.dismiss(reason, {welcome.run})
