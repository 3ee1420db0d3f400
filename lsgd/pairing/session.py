"""One conversation between two machines that pair, without sockets: what arrives, or time, in; what to do, out.

The *host* has a run, or is about to begin one; the *guest* has dialed it.

1. Both say who they are. If each has paired with the other before, the guest proves that (5).
2. Else each shows a code of two words, and a person types one machine's code on the other: the *typer*.
3. The typer offers an exchange. The *owner* of the code answers, unless it is spent.
4. If both offer at the same time, the guest's counts.
5. The typer proves first that it knows the password. If it does not, that is one of three wrong codes of the owner,
   and the owner has shown nothing. Then the owner proves the same, or the typer leaves.
6. All that follows is encrypted.

What depends on a password is sent a moment later than it was computed, so that the time tells nothing about it.
"""

import enum
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from lsgd.errors import ProtocolError
from lsgd.pairing.code import TRIES, OwnCode
from lsgd.pairing.proof import Cipher, Exchange, Keys, is_equal

VERSION = 1
MAX_NBYTES = 8192
"""Longest message."""

HIDE_S = 0.3
"""How long after a message arrives the answer leaves, if it depends on a password; computing it takes 0.02 s."""

HELLO_WITHIN_S, PROOF_WITHIN_S, CODE_WITHIN_S, TALK_WITHIN_S = 5.0, 10.0, 600.0, 60.0
"""How long a conversation may wait: for who the other is, for a proof, for a person to type, for a message later on."""

_Field = TypeVar("_Field", str, bytes, bool, int)


@dataclass(frozen=True)
class Hello:
    """Who a machine is: its identity, its host name, and the program that it wants to train with."""

    identity: str
    name: str
    script: str = ""


@dataclass(frozen=True)
class Send:
    """Send this, ``pause_s`` from now."""

    data: bytes
    pause_s: float = 0.0


@dataclass(frozen=True)
class AskForCode:
    """A person has to type a code, here or there. ``wrong``: the one just typed here was wrong."""

    wrong: bool = False


@dataclass(frozen=True)
class WrongCode:
    """Somebody has typed a wrong code on the other machine. ``left``: how many tries there are."""

    left: int


@dataclass(frozen=True)
class Paired:
    """Both have proved themselves. ``lasting``: what to keep for the next time; empty: it is kept already."""

    lasting: bytes


@dataclass(frozen=True)
class Heard:
    """A message of the machine that has proved itself."""

    message: dict[str, Any]


@dataclass(frozen=True)
class End:
    """The conversation is over; close the connection when all is sent."""

    why: str


Effect = Send | AskForCode | WrongCode | Paired | Heard | End


class State(enum.Enum):
    """Where a conversation is."""

    GREETING = "greeting"
    CHOOSING = "choosing"
    OFFERED = "offered"
    ANSWERED = "answered"
    PROVED = "proved"
    PAIRED = "paired"
    ENDED = "ended"


_WITHIN_S = {
    State.GREETING: HELLO_WITHIN_S,
    State.CHOOSING: CODE_WITHIN_S,
    State.OFFERED: PROOF_WITHIN_S,
    State.ANSWERED: PROOF_WITHIN_S,
    State.PROVED: PROOF_WITHIN_S,
    State.PAIRED: TALK_WITHIN_S,
    State.ENDED: math.inf,
}


class Session:
    """One side of a conversation.

    Args:
        hosts: whether this is the host's side.
        own: who this machine is.
        code: the code that it shows.
        secret_of: returns what is kept of a machine; empty: nothing.

    Attributes:
        other: who the other one is; None until it has said so.
        stage: where the conversation is.
    """

    def __init__(
        self, own: Hello, code: OwnCode, secret_of: Callable[[str], bytes], now: float, *, hosts: bool
    ) -> None:
        self.other: Hello | None = None
        self.state = State.GREETING
        self._own = own
        self._code = code
        self._secret_of = secret_of
        self._hosts = hosts
        self._since = now
        self._hellos: dict[bool, bytes] = {}  # by whether it is the host's
        self._exchange: Exchange | None = None
        self._by_code = False
        self._keys: Keys | None = None
        self._typed_wrong = 0
        self._ciphers: tuple[Cipher, Cipher] | None = None  # what it sends and what it receives

    def start(self) -> list[Effect]:
        """Return how the conversation begins: the host greets, the guest waits."""
        return [self._greet(knows=False)] if self._hosts else []

    def receive(self, data: bytes, now: float) -> list[Effect]:
        """Return what a message has to be answered with, or the end if it is none that may come now."""
        try:
            return self._receive(data, now)
        except ProtocolError as error:
            return self.refuse(str(error), now)

    def refuse(self, what: str, now: float) -> list[Effect]:
        """Return the end of the conversation with a machine that does not keep to the rules."""
        return self._end(f"it says what it may not say: {what}", now)

    def type(self, code: str, now: float) -> list[Effect]:
        """Return what follows from a code that was typed here."""
        if self.state is not State.CHOOSING:
            return []
        return self._offer(code.encode(), now, by_code=True)

    def say(self, message: dict[str, Any]) -> list[Effect]:
        """Return how to send a message to the machine that has proved itself."""
        assert self._ciphers is not None
        return [Send(self._ciphers[0].seal(_pack(message)))]

    def tick(self, now: float) -> list[Effect]:
        """Return what follows from the time."""
        if now - self._since < _WITHIN_S[self.state]:
            return []
        waits_for = "nobody has typed a code" if self.state is State.CHOOSING else "it does not answer"
        return self._end(f"{waits_for} for {_WITHIN_S[self.state]:g} s", now)

    def lost(self, now: float) -> None:
        """Note that the connection is gone."""
        self._end("", now)

    def _receive(self, data: bytes, now: float) -> list[Effect]:
        if self.state is State.PAIRED:
            assert self._ciphers is not None
            self._since = now
            return [Heard(_unpack(self._ciphers[1].open(data)))]
        message = _unpack(data)
        kind = _field(message, "is", str)
        if kind == "hello" and self.state is State.GREETING:
            return self._meet(message, data, now)
        if kind == "unknown" and self.state in (State.CHOOSING, State.OFFERED):
            return self._choose(now)
        if kind == "offer" and self.state is State.CHOOSING:
            return self._answer(message, now)
        if kind == "offer" and self.state is State.OFFERED:  # both were typed: the guest's counts
            return self._answer(message, now) if self._hosts else []
        if kind == "answer" and self.state is State.OFFERED:
            return self._prove(message, now)
        if kind == "proof" and self.state is State.ANSWERED:
            return self._judge(message, now)
        if kind == "proof" and self.state is State.PROVED:
            return self._believe(message, now)
        if kind == "wrong" and self.state is State.PROVED:
            return self._was_wrong(now)
        if kind == "spent":
            return self._end("three wrong codes were typed, and its code is void: start lsgd up there again", now)
        raise ProtocolError(f"{kind[:20]!r} while {self.state.value}")

    def _greet(self, *, knows: bool) -> Send:
        hello = {"is": "hello", "version": VERSION, "knows": knows, **vars(self._own)}
        self._hellos[self._hosts] = _pack(hello)
        return Send(self._hellos[self._hosts])

    def _meet(self, message: dict[str, Any], data: bytes, now: float) -> list[Effect]:
        """Take the other one's greeting."""
        if (version := _field(message, "version", int)) != VERSION:
            return self._end(f"it pairs by version {version}, not {VERSION}: install the same lsgd on both", now)
        name, script = (_printable(_field(message, key, str)) for key in ("name", "script"))
        self.other = Hello(_field(message, "identity", str)[:64], name, script)
        if self.other.identity == self._own.identity:
            return self._end("that is this machine", now)
        self._hellos[not self._hosts] = data
        secret = self._secret_of(self.other.identity)
        if self._hosts:
            if not _field(message, "knows", bool):
                return self._choose(now)
            self._move(State.CHOOSING, now)  # its offer follows
            return [] if secret else [Send(_pack({"is": "unknown"})), *self._choose(now)]
        greeting = self._greet(knows=bool(secret))
        return [greeting, *(self._offer(secret, now, by_code=False) if secret else self._choose(now))]

    def _choose(self, now: float, *, wrong: bool = False) -> list[Effect]:
        self._exchange = None
        self._move(State.CHOOSING, now)
        return [AskForCode(wrong)]

    def _new_exchange(self, password: bytes, *, types: bool) -> Exchange:
        assert self.other is not None
        typer, owner = (self._own, self.other) if types else (self.other, self._own)
        context = hashlib.sha256(self._hellos[True]).digest() + hashlib.sha256(self._hellos[False]).digest()
        return Exchange(password, typer.identity, owner.identity, context, types=types)

    def _offer(self, password: bytes, now: float, *, by_code: bool) -> list[Effect]:
        self._by_code = by_code
        self._exchange = self._new_exchange(password, types=True)
        self._move(State.OFFERED, now)
        return [Send(_pack({"is": "offer", "code": by_code, "share": self._exchange.message}), HIDE_S)]

    def _answer(self, message: dict[str, Any], now: float) -> list[Effect]:
        assert self.other is not None
        by_code, share = _field(message, "code", bool), _field(message, "share", bytes)
        password = self._code.words.encode() if by_code else self._secret_of(self.other.identity)
        if not password:
            return [Send(_pack({"is": "unknown"})), *self._choose(now)]
        if by_code and not self._code.acquire():
            return [Send(_pack({"is": "spent"})), *self._end("its code was one too many", now)]
        self._by_code = by_code
        self._move(State.ANSWERED, now)
        self._exchange = self._new_exchange(password, types=False)
        self._keys = self._exchange.keys(share)
        return [Send(_pack({"is": "answer", "share": self._exchange.message}), HIDE_S)]

    def _prove(self, message: dict[str, Any], now: float) -> list[Effect]:
        assert self._exchange is not None
        self._keys = self._exchange.keys(_field(message, "share", bytes))
        self._move(State.PROVED, now)
        return [Send(_pack({"is": "proof", "proof": self._keys.typer_proof}), HIDE_S)]

    def _judge(self, message: dict[str, Any], now: float) -> list[Effect]:
        """The owner has the typer's proof."""
        assert self._keys is not None
        right = is_equal(_field(message, "proof", bytes), self._keys.typer_proof)
        if self._by_code:
            self._code.release(wrong=not right)
        self._move(State.CHOOSING, now)
        if right:
            proof = Send(_pack({"is": "proof", "proof": self._keys.owner_proof}), HIDE_S)
            return [proof, self._open(now, types=False)]
        if not self._by_code:  # what one of them kept is another time's: from now on only a code counts
            self._secret_of = lambda identity: b""
            return [Send(_pack({"is": "wrong"}), HIDE_S), *self._choose(now)]
        wrong = WrongCode(TRIES - self._code.wrong)
        if self._code.is_spent:
            return [Send(_pack({"is": "spent"}), HIDE_S), wrong, *self._end("three wrong codes", now)]
        return [Send(_pack({"is": "wrong"}), HIDE_S), wrong]

    def _believe(self, message: dict[str, Any], now: float) -> list[Effect]:
        """The typer has the owner's proof."""
        assert self._keys is not None
        if not is_equal(_field(message, "proof", bytes), self._keys.owner_proof):
            return self._end("it does not know the code: it is not the machine that shows it", now)
        return [self._open(now, types=True)]

    def _was_wrong(self, now: float) -> list[Effect]:
        self._typed_wrong += self._by_code
        if self._typed_wrong >= TRIES:
            return self._end("three wrong codes", now)
        return self._choose(now, wrong=self._by_code)

    def _open(self, now: float, *, types: bool) -> Paired:
        assert self._keys is not None
        sends, receives = self._keys.typer_sends, self._keys.owner_sends
        self._ciphers = (Cipher(sends), Cipher(receives)) if types else (Cipher(receives), Cipher(sends))
        self._move(State.PAIRED, now)
        return Paired(self._keys.lasting if self._by_code else b"")

    def _move(self, state: State, now: float) -> None:
        self.state, self._since = state, now

    def _end(self, why: str, now: float) -> list[Effect]:
        if self.state is State.ENDED:
            return []
        if self.state is State.ANSWERED and self._by_code:
            self._code.release(wrong=False)
        self._move(State.ENDED, now)
        return [End(why)]


def _pack(message: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


def _unpack(data: bytes) -> dict[str, Any]:
    """Return a message.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise ProtocolError("it is no message") from None
    if not isinstance(message, dict):
        raise ProtocolError("it is no message")
    return message


def _field(message: dict[str, Any], name: str, kind: type[_Field]) -> _Field:
    value = message.get(name)
    if type(value) is not kind:
        raise ProtocolError(f"its {name} is missing or has another type")
    return value


def _printable(text: str) -> str:
    """Return a stranger's text as it may be shown: short, in one line, without control characters."""
    return "".join(character for character in text if character.isprintable())[:64]
