"""What an operator asks of a running global server: its status, and to stop."""

import json
import secrets
import time
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lsgd.errors import ConfigError, JoinError, ProtocolError
from lsgd.protocol.keys import OPERATOR
from lsgd.protocol.messages import (
    Operator,
    Refused,
    Status,
    decode,
    encode,
)
from lsgd.protocol.sockets import Connector, ConnectorKeys, Poller

ANSWER_WITHIN_S = 5.0
REFUSED_AFTER_S = 0.5  # a handshake that fails may be that of a server which is just being started


def ask(
    address: str, message: Operator, keys: ConnectorKeys | None = None, within_s: float | None = None
) -> dict[str, Any]:
    """Ask the global server at ``address`` for the state of its run, to end it or to change it; return its state.

    Raises:
        JoinError: nobody answers there within ``within_s``, or 5 s.
        ConfigError: the server refuses the change, and says why.
    """
    started_at = time.monotonic()
    within_s = within_s or ANSWER_WITHIN_S
    sent = False
    name = keys.name if keys else OPERATOR
    with Connector(address, f"{name}#{secrets.randbits(63)}".encode(), keys) as link:
        poller = Poller(link)
        while (waited_s := time.monotonic() - started_at) < within_s:
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
        f"no global server answers at {address} within {within_s:g} s; give its address with --connect "
        f"(it prints it when it starts)"
    )


def view(status: dict[str, Any]) -> Group:
    """Return a status for people: three lines, and a table of the workers."""
    limit = f" of {status['iterations']}" if status["iterations"] else ""
    rate = status["count"] / status["seconds"] if status["seconds"] else 0.0
    lines = Text(
        f"run {status['run']}, {status['algorithm']}: {status['state']}, {status['reason']}\n"
        f"{status['count']}{limit} iterations in {status['seconds']:.1f} s ({rate:.1f} a second), "
        f"{status['rounds_global']} global and {status['rounds_local']} local rounds, "
        f"generation {status['generation']}\n"
        f"period {status['period']}: {status['period_reason']}"
    )
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("worker", no_wrap=True)
    for name in ("rank", "state", "iterations", "loss", "led", "heard"):
        table.add_column(name, justify="right", no_wrap=True)
    for member in status["members"]:
        table.add_row(
            member["worker"],
            "-" if member["rank"] < 0 else str(member["rank"]),
            member["state"],
            str(member["done"]),
            "-" if member["loss"] is None else f"{member['loss']:.4g}",
            str(member["times_leader"]),
            f"{member['heard_s_ago']:.1f} s",
        )
    return Group(lines, table) if status["members"] else Group(lines)
