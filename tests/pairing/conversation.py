"""Two sides of a conversation, and the messages between them, on a clock that the test moves."""

from dataclasses import dataclass, field

from lsgd.pairing.code import OwnCode
from lsgd.pairing.session import AskForCode, Effect, End, Heard, Hello, Paired, Send, Session, State, WrongCode

HOST, GUEST = True, False


@dataclass
class Conversation:
    """A host and a guest. ``kept``: what each has kept of the other, by side."""

    codes: dict[bool, OwnCode] = field(
        default_factory=lambda: {HOST: OwnCode("amber wolf"), GUEST: OwnCode("iris fox")}
    )
    kept: dict[bool, bytes] = field(default_factory=lambda: {HOST: b"", GUEST: b""})

    def __post_init__(self) -> None:
        self.now = 0.0
        self.sides = {side: self._session(side) for side in (HOST, GUEST)}
        self.wire: list[tuple[float, bool, bytes]] = []  # when it arrives, at which side
        self.said: list[tuple[bool, bytes]] = []  # all that a listener has heard: by whom
        self.effects: dict[bool, list[Effect]] = {HOST: [], GUEST: []}
        for side in (HOST, GUEST):
            self.do(side, self.sides[side].start())

    def _session(self, side: bool) -> Session:
        own = Hello("aaaa", "alpha", "train.py") if side is HOST else Hello("bbbb", "beta")
        return Session(own, self.codes[side], lambda identity: self.kept[side], 0.0, hosts=side)

    def do(self, side: bool, effects: list[Effect]) -> None:
        """Note what a side does, and put what it sends on the wire."""
        for effect in effects:
            if isinstance(effect, Send):
                due = max([self.now + effect.pause_s, *(at for at, to, _ in self.wire if to is not side)])
                self.wire.append((due, not side, effect.data))
                self.said.append((side, effect.data))
            else:
                self.effects[side].append(effect)
            if isinstance(effect, Paired) and effect.lasting:
                self.kept[side] = effect.lasting

    def deliver(self) -> bool:
        """Let the next message arrive; return whether there was one."""
        if not self.wire:
            return False
        first = min(self.wire, key=lambda entry: entry[0])
        self.wire.remove(first)
        self.now = max(self.now, first[0])
        self.do(first[1], self.sides[first[1]].receive(first[2], self.now))
        return True

    def settle(self) -> None:
        """Let all messages arrive."""
        while self.deliver():
            pass

    def type(self, side: bool, code: str) -> None:
        """Somebody types a code."""
        self.do(side, self.sides[side].type(code, self.now))

    def states(self) -> tuple[State, State]:
        """Return where both are."""
        return self.sides[HOST].state, self.sides[GUEST].state

    def heard(self, side: bool) -> list[dict]:
        """Return what a side was told in secret."""
        return [effect.message for effect in self.effects[side] if isinstance(effect, Heard)]

    def kinds(self, side: bool) -> list[str]:
        """Return what a side has noticed, in words."""
        words = {AskForCode: "ask", Paired: "paired", WrongCode: "wrong", Heard: "heard", End: "end"}
        return [words[type(effect)] for effect in self.effects[side]]
