"""``lsgd replay``: what the server of a run decided on its last inputs, and why, from the files in the run folder."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsgd.protocol.messages import Completed, Go, Heartbeat, NodeHello, Pause, Request, Stop, Waiting
from lsgd.server.inputs import replay
from lsgd.server.next_step import waits_for
from lsgd.server.state import Decision


def lines(folder: Path, last: int, worker: str = "") -> list[str]:
    """Return the last lines of what was said and decided, of one ``worker`` or of all.

    Raises:
        ConfigError: the folder has no inputs, or they cannot be read.
    """
    kept, waited = deque[str](maxlen=last), ""
    for seconds, message, decision, state in replay(folder):
        waits = str(state.stopping or waits_for(state, state.now))
        new = [*_of(message, decision, worker), *([f"    waits: {waits}"] if waits != waited and not worker else [])]
        if new:
            kept.extend([f"{seconds:9.3f} s  {_words(message)}", *new])
        waited = waits
    return list(kept)


def _of(message: Any, decision: Decision, worker: str) -> Iterator[str]:
    """Yield what a decision says: its notes with their codes, and its answers."""
    for note in decision.notes:
        if worker in note:
            yield f"    {note.code}: {note}"
    for name, _, answer in decision.answers:
        if worker in ("", name) and not isinstance(answer, Waiting):
            yield f"    to {name}: {_words(answer)}"
    if worker and getattr(message, "worker", "") == worker and not isinstance(message, Heartbeat):
        yield "    (heard)"


def _words(message: Any) -> str:
    """Return a message in a few words."""
    kind, who = type(message).__name__, getattr(message, "worker", "")
    match message:
        case None:
            return "time passes"
        case str():
            return message
        case dict():
            return "set " + " ".join(f"{name}={value}" for name, value in message.items())
        case Request():
            want = type(message.wants).__name__
            return f"{who} asks {message.seq} for {want}, {message.done} iterations made, round {message.committed}"
        case Completed() | Pause():
            return f"{who} {kind} {message.round if isinstance(message, Completed) else message.seq}"
        case Go() | Stop():
            order = message.round
            where = f", {order.scope} round {order.id} of generation {order.generation.number}" if order else ""
            what = f", {message.iterations} iterations" if isinstance(message, Go) else f", {message.reason}"
            return f"{kind} {message.seq}{what}{where}"
        case NodeHello():
            return f"node{message.node} ({message.host}) says hello"
        case _:
            return " ".join(filter(None, (who, kind, str(getattr(message, "reason", "")))))
