"""Joins a run: finds the local server, introduces this worker, and waits for the welcome."""

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TextIO

import torch
from torch import nn

from lsgd import stacks
from lsgd.client.control.channel import Channel, Message
from lsgd.client.control.closing import set_exit_codes
from lsgd.client.control.identity import (
    Identity,
    Interface,
    ends_others,
    gpu_name,
    identify,
    interface_towards,
    versions,
)
from lsgd.client.control.island import FollowerChannel, Island
from lsgd.client.control.solo import Solo, is_alone, launch_line, listens
from lsgd.errors import (
    ConfigError,
    EvictedError,
    ExchangeError,
    JoinError,
    RunOverError,
    SecondJoinError,
    ServerLostError,
)
from lsgd.flat import describe
from lsgd.output import detail
from lsgd.plan.plan import Plan
from lsgd.protocol.messages import (
    PROTOCOL,
    Join,
    Leave,
    Left,
    Origin,
    Welcome,
    WorkerHello,
    WorkerHelloReply,
    worker_name,
)
from lsgd.protocol.ports import DEFAULT_PORT
from lsgd.protocol.processes import pid_namespace
from lsgd.protocol.routes import has_address
from lsgd.run_folder import stage_of

logger = logging.getLogger("lsgd")

FIND_WITHIN_S = 3.5
"""How long a join looks for the local server, in seconds, unless that is there but busy; giving up takes one more."""

SILENCE_S = 20.0
"""How long a local server may be silent in a join, in seconds, until the worker looks whether it is still there."""

LEAVE_WITHIN_S = 3.0
"""How long a leaving worker waits for the servers to acknowledge, in seconds."""


_been_in = Counter[tuple[str, int]]()
"""How many stages of a run this process has been in to their ends, by the worker's place."""

WRAPPERS = ("optimizer", "base_optimizer", "_base_optimizer")
"""The attributes in which wrappers of optimizers keep the one that steps."""


@dataclass(frozen=True)
class Found:
    """The local server that a worker has found, and its connection to it.

    ``servers`` are those of a process that runs alone.
    """

    identity: Identity
    node: int
    global_address: str
    channel: Channel
    servers: Solo | None = None

    def close(self) -> None:
        """End the connection, and this process's own servers."""
        self.channel.close()
        if self.servers is not None:
            self.servers.close()


@dataclass(frozen=True, kw_only=True)
class Membership(Found):
    """A worker's place in a run, and its connection to the servers.

    All processes of an island have the same identity, ``join`` and welcome.
    """

    device: torch.device
    join: Join
    welcome: Welcome
    plan: Plan
    island: Island

    @property
    def address(self) -> str:
        """The address to exchange tensors on: that of the join, or what this machine has instead by now."""
        if self.global_address and not has_address(self.join.address):
            with contextlib.suppress(ConfigError):  # no route at the moment
                return _interface(self.global_address).address
        return self.join.address

    @property
    def who(self) -> tuple[str, int]:
        """The worker's name and incarnation: the first fields of most of its messages."""
        return self.join.worker, self.join.incarnation

    @property
    def relay(self) -> tuple[str, bytes]:
        """The address of the relay, and the proof that this worker is a member; an empty address: there is none."""
        return self.channel.relay if self.channel.relay[0] else (self.welcome.relay, self.welcome.relay_secret)

    @property
    def passed(self) -> bool:
        """Whether the run was beyond this stage already when the worker came to it."""
        return stage_of(self.welcome.run) > self.identity.stage

    def ends_stage(self) -> None:
        """Let this process come to the next stage of the run when it joins again."""
        _been_in[self.identity.place] = self.identity.stage

    def close(self) -> None:
        """End the connections, and this process's own servers."""
        self.island.close()
        super().close()


def find_server(island: Island, identity: Identity | None, timeout_s: float) -> Found:
    """Find this machine's local server, or start servers of this process; None: identify this worker first.

    A server that is there and does not answer, because it or its machine is busy, is waited for up to ``timeout_s``.
    All processes of an island call this. The head connects, the others go through it. Raises as ``Worker.join``.
    """
    own = identity or identify()
    stacks.listen(f"worker{own.index}" + (f", process {island.rank}" if island.size > 1 else ""), own.run_dir)
    with contextlib.ExitStack() as opened:
        servers, channel = None, None

        def find() -> tuple[Identity, WorkerHelloReply]:
            nonlocal servers, channel
            found = replace(own, stage=_been_in[own.place] + 1)
            servers, channel = _connect(found, opened, alone=identity is None and is_alone(os.environ))
            island.connect(channel)
            return found, _hello(channel, found, timeout_s)

        found, here = island.share("joins", find)
        opened.pop_all()
    channel = channel or FollowerChannel(found.local_address, found.incarnation, island)
    return Found(found, here.node, here.address, channel, servers)


def join_run(
    model: nn.Module,
    found: Found,
    timeout_s: float,
    load: Callable[[str, str, str], Origin],
    island: Island,
    step: int = 0,
    *,
    bears_delay: bool = False,
) -> Membership:
    """Join the run of a local server; raises as ``Worker.join``.

    All processes of an island call this. ``load`` restores the checkpoint of the worker with this name, whose model has
    this digest and summary, and returns where it is from. ``step``: place in the script's own loop. ``bears_delay``:
    whether the servers may choose a delay.
    """
    identity, channel = found.identity, found.channel
    interface = _interface(found.global_address)
    introduction = _introduction(model, identity, found.node, interface.address, load)
    join = replace(introduction, step=int(step), bears_delay=bears_delay, stage=identity.stage)
    try:
        welcome, plan = island.share("joins", lambda: _welcome(channel, join, timeout_s, island.shards))
    except RunOverError as error:
        if identity.stage > 1:
            raise _second_join(identity, str(error)) from None
        logger.warning("worker %d joins too late and has nothing to do: %s", identity.index, error)
        raise RunOverError(str(error), in_order=ends_others(os.environ)) from None
    except EvictedError:  # its node follows another server now: started again, it joins there
        set_exit_codes()
        raise
    channel.signs.lease_s = plan.run.lease_s
    island.has_joined(plan.run.lease_s)
    device = next(model.parameters()).device
    for warning in welcome.warnings:
        logger.warning("%s joins with other versions: %s", join.worker, warning)
    alone = plan.run.nodes == 1 and interface.name == "lo" and identity.run_dir is not None  # a launch of one node
    travel = f"; tensors travel on {interface.address} ({interface.name}), because {interface.reason}"
    if stage_of(welcome.run) > identity.stage:
        logger.warning(
            "%s: stage %d of the run is over, so it goes through it without training (its loop ends at once, and "
            "worker.first is false), on to stage %d",
            *(join.worker, identity.stage, stage_of(welcome.run)),
        )
    else:
        logger.info(
            "%s joins run %s as rank %d of %d on %s%s",
            *(join.worker, welcome.run, welcome.rank, welcome.world_size, device, "" if alone else travel),
        )
    return Membership(**vars(found), device=device, join=join, welcome=welcome, plan=plan, island=island)


def _connect(identity: Identity, opened: contextlib.ExitStack, *, alone: bool) -> tuple[Solo | None, Channel]:
    """Return this process's own servers, if it runs ``alone``, and its channel."""
    servers, address = None, identity.local_address
    if alone:
        servers = Solo(os.environ, identity)
        opened.callback(servers.close)
        address = servers.address
    channel = Channel(address, identity.incarnation, FIND_WITHIN_S)
    opened.callback(channel.close)
    return servers, channel


def _introduction(
    model: nn.Module, identity: Identity, node: int, address: str, load: Callable[[str, str, str], Origin]
) -> Join:
    """Restore the worker's checkpoint, and return its introduction."""
    digest, summary = describe(model)
    worker = worker_name(node, identity.index)
    origin = load(worker, digest, summary)
    return Join(
        protocol=PROTOCOL,
        worker=worker,
        incarnation=identity.incarnation,
        node=node,
        index=identity.index,
        versions=versions(),
        model=digest,
        model_summary=summary,
        gpu=gpu_name(next(model.parameters()).device),
        address=address,
        resumed=origin.iterations,
        resumed_run=origin.run,
    )


def unwrapped(given: Any) -> list[torch.optim.Optimizer]:
    """Return the given optimizer or optimizers as a list, without their wrappers; raise ConfigError for others."""
    several = isinstance(given, Iterable) and not any(hasattr(given, name) for name in WRAPPERS)
    return [_unwrapped(x) for x in (given if several else [given])]


def torch_optimizers(model: nn.Module, given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a worker joins with, without their wrappers.

    Raises:
        ConfigError: there is none, one is not an optimizer, or one has a parameter that is not the model's.
    """
    optimizers = unwrapped(given)
    if not optimizers:
        raise ConfigError("Worker.join got no optimizer, so nothing would be trained; pass one, or a list of them")
    known = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = optimizer.param_groups
        if any(p.requires_grad and id(p) not in known for group in groups for p in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__} has a parameter that is not the model's, so it would not be exchanged; "
                f"pass the whole model, and create the optimizer after model.to(...)"
            )
    return optimizers


def _unwrapped(given: Any) -> torch.optim.Optimizer:
    """Return the innermost optimizer, the one that steps: wrappers keep it in an attribute."""
    inner = given
    while (held := next((x for name in WRAPPERS if (x := getattr(inner, name, None)) is not None), None)) is not None:
        if type(inner).__name__ == "Lookahead" and held is not getattr(inner, "_base_optimizer", None):
            raise ConfigError(
                f"{type(inner).__module__}.Lookahead keeps its slow weights where rounds cannot move them with the "
                f"model, so it would undo them; use timm.optim.Lookahead"
            )
        inner = held
    if type(inner).__name__ == "ScheduleFreeWrapper":
        raise ConfigError(
            "ScheduleFreeWrapper swaps the model's weights within a step, where rounds come; use a class of "
            "schedulefree of its own, such as AdamWScheduleFree or SGDScheduleFree"
        )
    if not isinstance(inner, torch.optim.Optimizer):
        kind = type(given)
        raise ConfigError(
            f"a worker takes a torch.optim.Optimizer, or a wrapper with one as `.optimizer` or `.base_optimizer`, not "
            f"a {kind.__module__}.{kind.__qualname__}; pass the torch optimizer that it steps"
        )
    return inner


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Formatter(logging.Formatter):
    """Marks what is only information as a detail, for `lsgd launch`."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if record.levelno > logging.INFO else "\n".join(map(detail, line.split("\n")))


def log_to_stderr(level: int = logging.INFO) -> None:
    """Show lsgd's messages from this level up, even if the program has not set up logging."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = _Stderr()
    handler.setFormatter(_Formatter("lsgd: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)


def _ask(channel: Channel, message: Message, answer: type, what: str, timeout_s: float) -> Any:
    """Ask, for up to ``timeout_s``, a local server that may be silent for as long as it is there."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return channel.ask(message, lambda m: isinstance(m, answer), what=what, timeout_s=max(0.0, left_s))
        except ServerLostError as error:
            if channel.endings.given_up or not listens(channel.address):
                raise
            channel.silence.local_s = SILENCE_S
            words = "%s; it is there, so this worker asks again for %.0f s"
            logger.warning(words, str(error).partition("; ")[0], max(0.0, deadline_s - time.monotonic()))


def _hello(channel: Channel, identity: Identity, timeout_s: float) -> WorkerHelloReply:
    where = WorkerHello(PROTOCOL, identity.incarnation, os.getpid(), pid_namespace(), identity.stage)
    try:
        what = (
            f"waiting for stage {identity.stage} of the run" if identity.stage > 1 else "looking for the local server"
        )
        here: WorkerHelloReply = _ask(channel, where, WorkerHelloReply, what, timeout_s)
    except ExchangeError as error:
        raise JoinError(str(error)) from None
    except RunOverError as error:
        over = RunOverError(f"stage {identity.stage} of the run does not begin: {error}", in_order=True)
        logger.warning("worker %d ends: %s", identity.index, over)
        raise over from None
    except ServerLostError:
        if identity.stage > 1:
            raise _second_join(identity, f"no local server answers at {channel.address}") from None
        raise JoinError(
            f"no local server answers at {channel.address}; start the script with its servers: {launch_line()}; or "
            f"alone: LSGD_SOLO=1, without LSGD_LOCAL; or start a server on this machine by hand: lsgd-server --local "
            f"--node N --connect tcp://GLOBAL-SERVER:{DEFAULT_PORT} (and the global one once: lsgd-server --global); "
            f"set LSGD_LOCAL for another address"
        ) from None
    channel.signs.introduce(where)
    channel.silence.local_s = SILENCE_S
    return here


def _second_join(identity: Identity, why: str) -> SecondJoinError:
    """Return the error for a next stage that servers without a launcher do not begin."""
    set_exit_codes()
    return SecondJoinError(
        f"this script joins again, for stage {identity.stage} of its run, but {why}. Servers that were started by hand "
        f"serve one training: start the script by `lsgd launch -- python SCRIPT`, which begins a stage for each"
    )


def _welcome(channel: Channel, join: Join, timeout_s: float, shards: int) -> tuple[Welcome, Plan]:
    """Return the servers' welcome and its plan; a worker that cannot use the plan leaves, so that no one waits."""
    channel.signs.live_as(join.worker)
    what = f"{join.worker} waits to join"
    try:
        welcome: Welcome = _ask(channel, join, Welcome, what, timeout_s)
    except (ServerLostError, ExchangeError) as error:
        raise JoinError(str(error)) from None
    try:
        plan = Plan.from_json(welcome.plan)
        if shards > 1 and (obstacle := plan.obstacle_to_islands()):
            raise ConfigError(f"its model is sharded over {shards} processes, and {obstacle}")
    except ConfigError as error:
        leave = Leave(join.worker, join.incarnation, 0, True, str(error))
        with contextlib.suppress(ExchangeError, JoinError, ServerLostError):
            channel.ask(leave, lambda m: isinstance(m, Left), what="leaving", timeout_s=LEAVE_WITHIN_S)
        raise JoinError(f"{join.worker} cannot take part: {error}") from None
    channel.silence.local_s = channel.silence.global_s = plan.run.server_timeout_s
    channel.endings.run = welcome.run
    return welcome, plan


def _interface(global_address: str) -> Interface:
    """Return the interface towards the global server; loopback if that surely is on this machine."""
    if not global_address.startswith("tcp://"):
        return Interface("127.0.0.1", "lo", "the global server is on this machine")
    return interface_towards(global_address.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
