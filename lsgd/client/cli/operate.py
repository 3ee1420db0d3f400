"""What an operator asks of a running global server: its status, and to stop."""

import json
import secrets
import time
from typing import Any

from lsgd.errors import ConfigError, JoinError, ProtocolError
from lsgd.protocol.keys import OPERATOR
from lsgd.protocol.messages import (
    ChangeSetting,
    Operator,
    Refused,
    Status,
    StatusQuery,
    StopRun,
    decode,
    encode,
)
from lsgd.protocol.sockets import DEFAULT_PORT, Link, LinkKeys, Poller

DEFAULT_ADDRESS = f"tcp://127.0.0.1:{DEFAULT_PORT}"
ANSWER_WITHIN_S = 5.0
REFUSED_AFTER_S = 0.5  # a handshake that fails may be that of a server which is just being started


def query(address: str, keys: LinkKeys | None = None) -> dict[str, Any]:
    """Return the state of the run that the global server at ``address`` holds.

    Raises:
        JoinError: nobody answers there within 5 s.
    """
    return _ask(address, StatusQuery(0), keys)


def stop(address: str, reason: str, keys: LinkKeys | None = None) -> dict[str, Any]:
    """Ask the global server at ``address`` to end its run with a consensus model; return its state.

    Raises:
        JoinError: nobody answers there within 5 s.
    """
    return _ask(address, StopRun(reason), keys)


def change(address: str, name: str, value: str, keys: LinkKeys | None = None) -> dict[str, Any]:
    """Change a numeric setting of the run, from its next global round on; return its state.

    Raises:
        JoinError: nobody answers there within 5 s.
        ConfigError: the server refuses the change, and says why.
    """
    return _ask(address, ChangeSetting(name, value), keys)


def _ask(address: str, message: Operator, keys: LinkKeys | None) -> dict[str, Any]:
    started_at = time.monotonic()
    sent = False
    name = keys.name if keys else OPERATOR
    with Link(address, f"{name}#{secrets.randbits(63)}".encode(), keys) as link:
        poller = Poller(link)
        while (waited_s := time.monotonic() - started_at) < ANSWER_WITHIN_S:
            if waited_s > REFUSED_AFTER_S and (trouble := link.trouble()):
                raise JoinError(f"the global server at {address} does not let us in: {trouble}")
            sent = sent or link.send([encode(message)])
            poller.wait(0.2 if sent else 0.02)
            for frames in link.receive():
                for frame in frames[1::2]:
                    answer = decode(frame)
                    if isinstance(answer, Status):
                        return dict(json.loads(answer.report))
                    if isinstance(answer, Refused):
                        raise ConfigError(answer.reason)
                    raise ProtocolError(f"the server at {address} answered {type(answer).__name__}")
    raise JoinError(
        f"no global server answers at {address} within {ANSWER_WITHIN_S:g} s; give its address with --connect "
        f"(it prints it when it starts)"
    )


def table(status: dict[str, Any]) -> str:
    """Return a status as lines for people."""
    limit = f" of {status['iterations']}" if status["iterations"] else ""
    rate = status["count"] / status["seconds"] if status["seconds"] else 0.0
    lines = [
        f"run {status['run']}, {status['algorithm']}: {status['state']}, {status['reason']}",
        f"{status['count']}{limit} iterations in {status['seconds']:.1f} s ({rate:.1f} a second), "
        f"{status['rounds_global']} global and {status['rounds_local']} local rounds, "
        f"generation {status['generation']}",
    ]
    if status["members"]:
        lines.append(
            f"{'worker':20} {'rank':>4} {'state':>7} {'iterations':>10} {'loss':>10} {'led':>5} {'heard':>8}"
        )
    for member in status["members"]:
        loss = "-" if member["loss"] is None else f"{member['loss']:.4g}"
        rank = "-" if member["rank"] < 0 else str(member["rank"])
        lines.append(
            f"{member['worker']:20} {rank:>4} {member['state']:>7} {member['done']:>10} {loss:>10} "
            f"{member['times_leader']:>5} {member['heard_s_ago']:>6.1f} s"
        )
    return "\n".join(lines)
