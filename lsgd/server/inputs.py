"""The last inputs of a run's coordinator, in two files that take turns: with them ``lsgd replay`` decides again.

Each file begins with the state as it was then. The coordinator has neither clock nor chance, so the same inputs lead to
the same decisions. The files hold no key and no certificate.
"""

import copy
import enum
import io
import pickle
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from lsgd.errors import ConfigError, ProtocolError
from lsgd.protocol.messages import decode
from lsgd.run_folder import INPUTS
from lsgd.server.coordinator import Coordinator
from lsgd.server.state import Decision, RunState
from lsgd.server.tenure import Access

MOST_NBYTES = 8 << 20
"""How large each of the two files becomes."""

MOST_STATE_NBYTES = 256 << 20
"""The largest state that is read."""

_PLAIN = {("builtins", "set"), ("builtins", "frozenset"), ("collections", "deque"), ("collections", "Counter")}
_STATE = "state tenure ledger rounds roster phases links calls data life changes reasons"
_ROOMS = (
    *(f"server.{name}" for name in _STATE.split()),
    *("protocol.messages", "protocol.wants", "protocol.events", "plan.plan", "plan.run", "settings", "algorithms"),
)


class Kind(enum.IntEnum):
    """What the coordinator was asked to do."""

    STATE = 0
    HANDLE = 1
    TICK = 2
    CHANGE = 3
    MEET = 4
    CLOSED = 5


class Inputs:
    """Writes what comes to a coordinator; a full disk ends that, and nothing else. ``folder``: None: nowhere."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._nbytes = 0
        self._packer = msgpack.Packer(autoreset=False)  # packed, and not in the file yet

    def add(self, state: RunState, kind: Kind, now: float, what: Any = b"") -> None:
        """Note an input before it is decided."""
        if self._folder is None:
            return
        if self._file is None or self._nbytes > MOST_NBYTES:
            try:
                self.rotate(state)
            except OSError:
                self._folder = None
                return
        self._pack((kind, now, state.tenure.guarded, what))

    def rotate(self, state: RunState) -> None:
        """Begin a file with this state, in place of the older one.

        Raises:
            OSError: it cannot be written.
        """
        if self._folder is None:
            return
        if self._file is not None:
            self._write()
            self._file.close()
        newer, older = (self._folder / name for name in INPUTS)
        with suppress(FileNotFoundError):
            newer.replace(older)
        self._file, self._nbytes = newer.open("wb"), 0
        bare = copy.copy(state)
        bare.tenure = replace(state.tenure, access=Access(relay=state.tenure.access.relay))
        self._pack((Kind.STATE, state.now, state.tenure.guarded, zlib.compress(pickle.dumps(bare))))

    def begins_anew(self) -> None:
        """Note that the coordinator has another state from now on."""
        self._nbytes = MOST_NBYTES + 1

    def flush(self) -> None:
        """Let other programs read what was written."""
        if self._file is not None:
            try:
                self._write()
                self._file.flush()
            except OSError:
                self._folder = self._file = None

    def close(self) -> None:
        """Write what is left, and end."""
        self.flush()
        if self._file is not None:
            self._file.close()
        self._folder = self._file = None

    def _pack(self, record: tuple[int, float, bool, Any]) -> None:
        self._packer.pack(record)
        what = record[-1]
        self._nbytes += len(what) if isinstance(what, bytes) else 1  # a node, or a few settings

    def _write(self) -> None:
        assert self._file is not None
        packed = self._packer.bytes()
        self._packer.reset()
        self._file.write(packed)


class _States(pickle.Unpickler):
    """Reads a state, whoever has written it: it makes plain values and the state's own classes, and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        ours = module.removeprefix("lsgd.")
        if ours != module and (ours in _ROOMS or ours.partition(".")[0] in _ROOMS):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a state")


def _state_of(packed: bytes) -> RunState:
    try:
        text = zlib.decompressobj().decompress(packed, MOST_STATE_NBYTES)
        state = _States(io.BytesIO(text)).load()
    except Exception as error:  # a damaged state raises anything
        raise ProtocolError(f"a state that cannot be read: {error!r:.200}") from None
    if not isinstance(state, RunState):
        raise ProtocolError(f"a {type(state).__name__} instead of a state")
    return state


def replay(folder: Path) -> Iterator[tuple[float, Any, Decision, RunState]]:
    """Decide again on the inputs in a run's folder: yield the time of each, what it was, the decision, and the state.

    The time is in seconds since the first of them; a tick is None, changed settings are a dictionary.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """
    paths = [path for name in reversed(INPUTS) if (path := folder / name).exists()]
    if not paths:
        where = "name the run folder of the node that serves the run, or served it"
        raise ConfigError(f"{folder} has no {INPUTS[0]}: {where}")
    began_at: float | None = None
    for path in paths:
        coordinator: Coordinator | None = None
        try:
            for kind, now, guarded, what in _records(path):
                if kind == Kind.STATE:
                    coordinator = Coordinator(_state_of(what))
                    continue
                assert coordinator is not None
                began_at = now if began_at is None else began_at
                coordinator.state.tenure.guarded = guarded
                message, decision = _decide(coordinator, Kind(kind), now, what)
                yield now - began_at, message, decision, coordinator.state
        except (ProtocolError, ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"{path} cannot be replayed: {error}; use the lsgd that wrote it") from None


def _records(path: Path) -> Iterator[Any]:
    """Yield the records of a file, without an incomplete one at its end."""
    with path.open("rb") as file:
        yield from msgpack.Unpacker(file, max_buffer_size=4 * MOST_NBYTES)


def _decide(coordinator: Coordinator, kind: Kind, now: float, what: Any) -> tuple[Any, Decision]:
    match kind:
        case Kind.TICK:
            return None, coordinator.tick(now)
        case Kind.CHANGE:
            with suppress(ConfigError):
                coordinator.change(what)
            return what, Decision()
        case Kind.MEET:
            message: Any = decode(what)
            return message, coordinator.meet(message, now)
        case Kind.CLOSED:
            return f"the connection of node{what} closes", coordinator.closed(what, now)
        case _:
            message = decode(what)
            return message, coordinator.handle(message, now)
