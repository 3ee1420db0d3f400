"""Feeds the decoder and both servers frames that are wrong: ``python tests/server/fuzz.py --frames 1000000``.

A frame is a valid message with some damage: bits, lengths and types changed, parts cut, doubled or exchanged with those
of another message, random bytes, deep nesting, extension types. The decoder may only refuse it by ProtocolError, or
return a message that means the same when it is encoded again. The servers, real processes, must go on, answer as
before, have the same state as before, and not grow. Left out are frames that are valid orders by chance,
such as a stop or a greeting.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from lsgd.errors import ProtocolError
from lsgd.protocol.events import Note, encode_event
from lsgd.protocol.frames import pack, unpack
from lsgd.protocol.messages import (
    PROTOCOL,
    ChangeSettings,
    Completed,
    Copy,
    Data,
    Dealt,
    Endpoint,
    Events,
    EventsQuery,
    Generation,
    GenerationOver,
    Get,
    Go,
    Heartbeat,
    Join,
    Leave,
    Left,
    Meet,
    Moved,
    NodeHello,
    NodeLeave,
    NodeWelcome,
    Pause,
    Published,
    Put,
    Refused,
    Request,
    Round,
    RunOver,
    Status,
    StatusQuery,
    Stop,
    StopRun,
    Term,
    Waiting,
    Welcome,
    WorkerHello,
    WorkerHelloReply,
    decode,
    encode,
)
from lsgd.protocol.sockets import Connector, Listener, wait_for

ORDERS = (StopRun, ChangeSettings, NodeHello, NodeLeave, Join, RunOver, Refused, StatusQuery, EventsQuery, Meet, Moved)
"""Messages that rightly change something, or are answered at length, whoever says them."""

BATCH = 50
LOOK_EVERY = 5000
MAX_GROWTH_NBYTES = 64 << 20
DEADLINE_S = 120.0

VICTIM = ("node0/worker0", 7)  # a real member, whose state must not change
OTHER = ("node0/worker1", 8)


def samples() -> list[bytes]:
    """Return a valid frame of each kind, of nobody who is in the run."""
    generation = Generation.of(1, [(0, 1), (1, 0)], "tcp")
    round = Round(3, generation, "global", 0, (0, 1), 2, (), 0, False, '{"name": "leader"}')
    join = Join(PROTOCOL, *OTHER, 0, 1, {"torch": "2.13.0"}, "digest", "2 parameters", "", "127.0.0.1")
    messages: list[Any] = [
        *(join, WorkerHello(PROTOCOL, 8), WorkerHelloReply(0, "tcp://x:1"), Data(*OTHER, "digest"), Heartbeat(*OTHER)),
        Dealt(*OTHER, "train.py:7", {"length": "9"}, 3, "order"),
        *(Request(*OTHER, 1, 0, 0, 0, 0.5), Completed(*OTHER, 3), Pause(*OTHER, 1, 0)),
        *(Leave(*OTHER, 0, False, "why"), Left(), Put(*OTHER, 1, "key", b"value"), Get(*OTHER, 1, "key")),
        *(NodeHello(PROTOCOL, 0, 1, "host", "0.1.0"), NodeWelcome("run"), NodeLeave(0, 1, "why")),
        *(NodeWelcome("run", (Term(1, 0),), 5, (Endpoint(0, "tcp://x:1"),)), Copy("run", 1, b"state", 0, b"rounds")),
        *(
            Meet("run", (Term(2, 1),), 5, Endpoint(1, "tcp://x:1")),
            Moved("run", Endpoint(1, "tcp://x:1"), "why", "run"),
        ),
        *(RunOver("why"), StopRun("why"), ChangeSettings({"period": "8"}), StatusQuery(0), Refused("why")),
        *(EventsQuery(PROTOCOL, 0), Events("epoch", 1, 2, 0, (encode_event(1.0, Note("code", "words")),) * 2)),
        *(Welcome("run", "{}", 0, 2, ("a",)), Waiting(1, "why"), Go(1, round, 0.5)),
        *(Stop(1, round, "why"), GenerationOver(1, "why"), Published(1, "key", b"value"), Status("{}")),
    ]
    return [encode(message) for message in messages]


def damaged(frames: list[bytes], random: random.Random) -> bytes:
    """Return a frame with one to three damages."""
    frame = bytearray(random.choice(frames))
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(frame)) if frame else 0
        match random.randrange(9):
            case 0:
                frame[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                frame[at : at + 1] = bytes([frame[at] ^ 1 << random.randrange(8)]) if frame else b""
            case 2:
                del frame[at:]
            case 3:
                frame[at:at] = random.randbytes(random.randint(1, 20))
            case 4:
                frame[at:at] = frame[at : at + random.randint(1, 30)]
            case 5:
                other = random.choice(frames)
                frame[at:] = other[random.randrange(len(other)) :]
            case 6:  # another type, a long length, an extension
                kind = random.choice(b"\xc0\xc1\xc3\xc4\xc6\xc7\xc9\xca\xcb\xcf\xd3\xd4\xd8\xd9\xdb\xdc\xdd\xde\xdf")
                frame[at : at + 1] = bytes([kind]) + random.choice([b"", b"\xff\xff\xff\xff", random.randbytes(4)])
            case 7:
                frame[at:at] = b"\x91" * random.randint(1, 2000)
            case _:
                value = random.choice([float("nan"), 2**63, -(2**63), "x" * 1000, [], {}, None, b"", True])
                frame[at : at + 1] = msgpack.packb(value)
    return bytes(frame)


def damaged_together(frames: list[bytes], random: random.Random) -> bytes:
    """Return several frames packed into one, with one to three damages."""
    return damaged(pack(random.choices(frames, k=3)), random)


def harmless(part: bytes) -> bool:
    """Whether a server must not change anything for this part of a ZeroMQ message."""
    for frame in unpack([part]):
        try:
            message = decode(frame)
        except ProtocolError:
            continue
        if isinstance(message, ORDERS) or getattr(message, "incarnation", 0) == VICTIM[1]:
            return False
    return True


def fuzz_decoder(frames: int, random: random.Random) -> int:
    """Decode damaged frames; return how many were messages all the same."""
    valid, known = 0, samples()
    for _ in range(frames):
        for frame in unpack([random.choice([damaged, damaged_together])(known, random)]):
            try:
                message = decode(frame)
            except ProtocolError:
                continue
            valid += 1
            again = encode(message)
            assert encode(decode(again)) == again, frame
    return valid


class Server:
    """A server under test: a real process."""

    def __init__(self, *arguments: str) -> None:
        self.output = tempfile.NamedTemporaryFile(suffix=".log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lsgd.server", *arguments], stdout=self.output, stderr=subprocess.STDOUT
        )

    @property
    def said(self) -> str:
        return Path(self.output.name).read_text(errors="replace")

    def nbytes(self) -> int:
        """Return the memory that it has."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


def ask(link: Connector, question: bytes, answer: type, first: int) -> Any:
    """Say something until an answer of this type comes; ``first``: where in an answer its frames are."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        link.send([question])
        wait_for(0.5, link)
        for frames in link.receive():
            for frame in frames[first :: first + 1]:
                if isinstance(message := decode(frame), answer):
                    return message
    raise AssertionError(f"no {answer.__name__} within {DEADLINE_S:g} s")


@contextmanager
def attacking(address: str, pump: Callable[[], None]) -> Iterator[Callable[[list[bytes]], None]]:
    """Connect a peer; the value sends its frames, calling ``pump`` while the server takes no more."""
    with Connector(address, b"node0#8") as link:

        def send(frames: list[bytes]) -> None:
            until = time.monotonic() + DEADLINE_S
            while not link.send(frames):
                pump()
                assert time.monotonic() < until, "the server takes nothing more"
                time.sleep(0.001)
            for _ in link.receive():
                pass

        yield send


def fuzz_global(frames: int, random: random.Random) -> int:
    """Send damaged frames to a global server with one member; return by how many bytes it has grown."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/global"
        server = Server("--global", "--listen", address, "--workers", "2")
        try:
            with Connector(address, b"node0#1") as link, attacking(address, lambda: None) as send:
                join = Join(PROTOCOL, *VICTIM, 0, 0, {}, "digest", "2 parameters", "", "127.0.0.1")
                ask(link, encode(NodeHello(PROTOCOL, 0, 1, "host", "0.1.0")), NodeWelcome, 1)
                ask(link, encode(join), Waiting, 1)

                def state() -> object:
                    link.send([encode(Heartbeat(*VICTIM))])
                    status = json.loads(ask(link, encode(StatusQuery(0)), Status, 1).report)
                    for member in status["members"]:
                        del member["heard_s_ago"]
                    del status["stream"]  # it goes on by itself
                    return status

                return _feed(server, frames, random, send, state)
        finally:
            server.close()


def fuzz_local(frames: int, random: random.Random) -> int:
    """Send damaged frames to a local server from below and from above; return by how many bytes it has grown."""
    with tempfile.TemporaryDirectory() as folder, Listener("tcp://127.0.0.1:0") as above:
        address = f"ipc://{folder}/local"
        server = Server("--local", "--listen", address, "--connect", above.address)
        known = samples()
        node: list[bytes] = []

        def pump() -> None:
            for peer, received in above.receive():
                node[:] = [peer]
                if any(frame[1:2] == encode(NodeHello(1, 0, 1, "", ""))[1:2] for frame in received):
                    above.send(peer, [b"", encode(NodeWelcome("run"))])
            if node:
                wrong = [f for f in (damaged(known, random) for _ in range(4)) if harmless(f)]
                above.send(node[0], [f for frame in wrong for f in (random.choice([b"", b"8"]), frame)])

        try:
            with Connector(address, b"9") as link, attacking(address, pump) as send:

                def state() -> object:
                    pump()
                    return ask(link, encode(WorkerHello(PROTOCOL, 9)), WorkerHelloReply, 0)

                return _feed(server, frames, random, send, state)
        finally:
            server.close()


def _feed(
    server: Server,
    frames: int,
    random: random.Random,
    send: Callable[[list[bytes]], None],
    state: Callable[[], object],
) -> int:
    known, before = samples(), state()
    at_first_nbytes = server.nbytes()
    for number in range(0, frames, BATCH):
        batch = [frame for frame in (damaged(known, random) for _ in range(BATCH)) if harmless(frame)]
        if batch:
            send(batch)
        if harmless(together := damaged_together(known, random)):
            send([together])
        if number % LOOK_EVERY < BATCH or number + BATCH >= frames:
            assert server.process.poll() is None, server.said[-3000:]
            assert state() == before
    assert "Traceback" not in server.said
    grown = server.nbytes() - at_first_nbytes
    assert grown < MAX_GROWTH_NBYTES, f"it has grown by {grown} bytes"
    return grown


def main() -> None:
    """Feed all three and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="for each of the three")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, fuzz, unit in (
        ("decoder", fuzz_decoder, "were messages all the same"),
        ("global server", fuzz_global, "bytes grown"),
        ("local server", fuzz_local, "bytes grown"),
    ):
        started_at = time.monotonic()
        found = fuzz(arguments.frames, random.Random(arguments.seed))
        print(
            f"{name}: {arguments.frames:,} frames in {time.monotonic() - started_at:.0f} s, {found:,} {unit}",
            flush=True,
        )


if __name__ == "__main__":
    main()
