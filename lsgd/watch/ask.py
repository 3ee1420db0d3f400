"""Sends an operator's request to a running global server, and returns the answer."""

import json
import secrets
import time
from typing import Any

from lsgd.errors import ConfigError, JoinError, ProtocolError
from lsgd.protocol.keys import OPERATOR
from lsgd.protocol.messages import Operator, Refused, Status, decode, encode
from lsgd.protocol.sockets import Connector, ConnectorKeys, Poller
from lsgd.watch.reader import REFUSED_AFTER_S

ANSWER_WITHIN_S = 5.0


def ask(
    address: str, message: Operator, keys: ConnectorKeys | None = None, within_s: float | None = None
) -> dict[str, Any]:
    """Send a request to the global server at ``address``: show, end or change its run. Return the run's state.

    Raises:
        JoinError: no answer within ``within_s``, or 5 s.
        ConfigError: the server refuses the change, and says why.
    """
    started_at = time.monotonic()
    within_s = ANSWER_WITHIN_S if within_s is None else within_s
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
    raise JoinError(silent(address, within_s))


def silent(address: str, silent_s: float) -> str:
    """Return the message for a server that has not answered for ``silent_s``."""
    return (
        f"no global server answers at {address} within {silent_s:.2g} s; give its address with --connect "
        f"(it prints it when it starts)"
    )
