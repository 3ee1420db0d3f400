"""A node's process: carries its workers' messages, and starts, watches and ends the node's other processes."""

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lsgd.errors import ConfigError, EvictedError, NotTrainedError, OutlierError, RunOverError, ServerLostError
from lsgd.node.allegiance import Event, State
from lsgd.node.children import Children
from lsgd.node.following import SERVE_AGAIN_S
from lsgd.node.local_server import LocalServer
from lsgd.node.panel import Panel
from lsgd.node.process import Child, Command, Role, Running, cannot_start
from lsgd.node.restarts import RESTART_WINDOW_S, Restart
from lsgd.node.screen import show
from lsgd.protocol.processes import Orphans
from lsgd.protocol.sockets import wait_for
from lsgd.server.daemon import MOVED, TICK_S, Ending

STOP_PATIENCE_S = 180.0
"""How long a stopping run may take for its last round, which may wait for 120 s (``patience_s``), and for saving."""

SAVE_PATIENCE_S = 30.0
"""How long workers may take to save when no server will answer them."""

TERM_PATIENCE_S, KILL_PATIENCE_S = 5.0, 10.0
"""How long a process may take to end after SIGTERM, and the system to kill it after SIGKILL."""

ORPHAN_PATIENCE_S = 1.0
"""How long what the workers have left behind may take to end after SIGTERM."""

ORPHANS_EVERY_S = 1.0
"""How often orphans are looked for: that reads a file for each thread, and costs as much as all else in a turn."""

OBSERVE_PATIENCE_S = 15.0
"""How long observing processes may keep writing after the run's end."""

LINGER_S = 5.0
"""How long servers may run after the workers end, if nobody else needs them."""


@dataclass(frozen=True)
class _Step:
    """A step toward the end: wait for processes of these roles to end, after a signal perhaps.

    In a ``clean`` one the workers complete their last round and save, because the servers end the run.
    """

    roles: Sequence[Role]
    patience_s: float
    number: signal.Signals | None = None
    clean: bool = False


@dataclass
class _Way:
    """How far the node is on its way to the end: the step that it takes, until when, and those after it."""

    step: _Step | None = None
    deadline_s: float = 0.0
    steps: deque[_Step] = field(default_factory=deque)

    def next(self, now: float) -> _Step:
        """Take the next step."""
        self.step = self.steps.popleft()
        self.deadline_s = now + self.step.patience_s
        return self.step


@dataclass
class _Ended:
    """How processes have ended otherwise than by training to the end.

    Args:
        failed: the first that failed, and so ends the node.
        early: workers that left before the end of the run.
        late: workers whose last process joined after it.
        told: what the screen has said of how workers ended.
    """

    failed: Child | None = None
    early: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)

    def is_news(self, child: Child) -> bool:
        """Note how a process has ended; return whether no worker has ended so before."""
        is_news = child.role is not Role.WORKER or child.how_it_ended not in self.told
        self.told |= {child.how_it_ended} if child.role is Role.WORKER else set()
        return is_news


@dataclass(frozen=True)
class Stage:
    """What a node has for one stage of the run, besides its workers.

    Args:
        local: the local server, which carries it.
        commands: servers to start, and observers.
        panel: what shows it on a terminal.
        serve: returns the commands of the servers with which this node takes over; raises ConfigError if it cannot.
    """

    local: LocalServer
    commands: Sequence[Command]
    panel: Panel | None
    serve: Callable[[], Sequence[Command]]


class Node:
    """Runs the processes of a node until all have ended, or ends them.

    The first SIGINT, SIGTERM or SIGHUP (as SIGTERM) ends the run, or this node's part of it: the servers tell the
    workers. A second one kills all processes at once, but no SIGHUP does: a terminal that is closed may send two. If a
    process fails, the run is stopped the same way. But it continues without a worker that ended as an outlier. A
    process that was killed by a signal or evicted, or a server that failed in its own code, is restarted first, as
    often as :class:`Restarts` says. Workers that do not end, or that no server can reach, are asked to save and leave.
    Then the processes are ended by role, in the order of :class:`Role`.

    Args:
        name: name of the node.
        commands: processes to start, in this order; one server at most, the global one.
        start: starts the process of a command; gets its position, and whether it is a restart.
        say: shows a line.
        shared: whether the run has other nodes, which may need this node's servers when its workers have ended.
        serve: as in :class:`Stage`.
        following: returns what this node has for the next stage with this number of workers; the present one is over.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Command],
        local: LocalServer,
        start: Callable[[Command, int, bool], Running],
        say: Callable[[str], None],
        *,
        panel: Panel | None = None,
        shared: bool = False,
        serve: Callable[[], Sequence[Command]] = tuple,
        following: Callable[[int], Stage] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._commands = commands
        self._say = say
        self._clock = clock
        self._now = clock()
        self._shared = shared
        self._following = following
        self._stage = Stage(local, (), panel, serve)
        self._children = Children(start)
        self._ended = _Ended()
        self._signalled: signal.Signals | None = None
        self._way = _Way()
        self._stage_over_at = 0.0

    @property
    def _local(self) -> LocalServer:
        return self._stage.local

    def run(self, signals: Ending) -> None:
        """Run all processes until they have ended, or ``signals`` say that this node is to end."""
        local = next((c.environment.get("LSGD_LOCAL", "") for c in self._commands if c.role is Role.WORKER), "")
        orphans, looked_at = Orphans(f"LSGD_LOCAL={local}", lambda: self._children.pids), 0.0
        try:
            self.begin()
            if self._stage.panel:
                self._stage.panel.start()
            while self.turn(signals):
                wait_for(TICK_S, *self._local.sources, signals.wakeup)
                signals.wakeup.clear()
                if self._now - looked_at >= ORPHANS_EVERY_S:
                    looked_at = self._now
                    orphans.reap()
            self._local.close()
        finally:
            for child in self._children.alive():
                child.send(signal.SIGKILL)
            if left := orphans.terminate(ORPHAN_PATIENCE_S):
                self._say(f"ended what the workers' scripts had left running: processes {left}")
            if self._stage.panel:
                self._stage.panel.close()

    def begin(self) -> None:
        """Start all processes."""
        for number, command in enumerate(self._commands):
            try:
                self._start(command, number)
            except OSError as error:
                raise ConfigError(f"{command.name}: {cannot_start(command.arguments[0], error)}") from None

    def turn(self, signals: Ending) -> bool:
        """Carry messages, notice what has happened, and do what is due; return whether there is anything to wait for.

        Args:
            signals: what has asked this node to end since the last turn, by the names of signals.
        """
        self._now = self._clock()
        self._local.turn()
        while signals.received:
            self._stop(signal.Signals[signals.received.pop(0)])
        self._reap()
        self._match_servers()
        if self._local.next_is_due and self._way.step is None:
            self._begin_next()
        if self._local.failure and (self._way.step is None or self._way.step.clean):
            if self._local.workers.joined:  # else the end is near, and says it
                self._say(f"{self._name}: {self._local.failure}")
            self._end(self._ends())
        self._start_again()
        return self._advance()

    def _begin_next(self) -> None:
        """Begin the next stage of the run, once the servers of this one have ended."""
        assert self._following is not None
        old = [child for child in self._children.here if child.role.serves or child.role is Role.OBSERVER]
        self._stage_over_at = self._stage_over_at or self._now
        patient = self._now - self._stage_over_at < OBSERVE_PATIENCE_S
        if patient and any(child.status is None for child in old if child.role is not Role.RELAY):
            return
        self._stage_over_at = 0.0
        self._children.drop(old)
        if self._stage.panel:
            self._stage.panel.close()
        workers = [child for child in self._children.here if child.role is Role.WORKER]
        try:
            stage = self._following(sum(child.status is None or child.name in self._children.due for child in workers))
        except ConfigError as error:
            self._say(f"the next stage cannot begin: {error}")
            self._end_cleanly()
            return
        self._stage = stage
        self._say(f"{self._name}: stage {stage.local.stage} of the run begins")
        kept = [command for command in self._commands if command.role in (Role.WORKER, Role.PAGE)]
        for number, command in enumerate(stage.commands, start=len(kept)):
            self._start(command, number)
        self._commands = [*kept, *stage.commands]
        if self._stage.panel:
            self._stage.panel.start()

    @property
    def serves(self) -> bool:
        """Whether this node serves the run, or is about to."""
        return self._local.allegiance.state.serves

    def _match_servers(self) -> None:
        """Start this node's servers, or end them, as its allegiance says."""
        state, servers = self._local.allegiance.state, [child for child in self._children.here if child.role.serves]
        if servers and not state.servers:
            self._children.drop(servers)
            self._say(f"{self._name} {state.means}; its own servers are ended")
        elif state is State.CLAIMING and not servers and self._way.step is None:
            self._take_over()

    def _take_over(self) -> None:
        """Start the servers with which this node serves the run, because the node that did is gone."""
        before = len(self._children.here)
        try:
            commands = self._stage.serve()
            for number, command in enumerate(commands, start=len(self._commands)):
                self._start(command, number)
        except (ConfigError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self._say(f"this node cannot serve the run: {why}; it tries again in {SERVE_AGAIN_S:g} s")
            self._local.following.upon(Event.FAILED)
            self._children.drop(self._children.here[before:])
            return
        self._commands = [*self._commands, *commands]

    # -- starting ----------------------------------------------------------------------------------------------

    def _start(self, command: Command, number: int) -> None:
        child = self._children.start(command, number, self._now)
        self._local.workers.processes.watch(command.name, child.process.pid)

    def _start_again(self) -> None:
        for dead in self._children.take_due(self._now):
            try:
                self._start(dead.command, dead.number)
            except OSError as error:
                self._say(f"{dead.name} cannot be restarted: {error.strerror}")
                if dead.role.auxiliary:
                    self._lose(dead)
                elif not self._schedule_restart(dead):
                    self._fail(dead)
                continue
            self._children.here.remove(dead)
            if dead.role is Role.SERVER and self._way.step and self._way.step.clean:
                self._leave_run()  # its predecessor, which knew, is gone

    def _schedule_restart(self, child: Child) -> bool:
        """Schedule the restart of a process that was killed or evicted; return False if it may not restart."""
        if not child.restartable or not self._is_wanted(child):
            return False
        evicted = child.status == EvictedError.exit_code
        restart = self._children.restarts.evicted(child.name) if evicted else self._died(child)
        if restart is None:
            return False
        self._children.due[child.name] = self._now + restart.wait_s
        when = f"in {restart.wait_s:g} s" if restart.wait_s else "now"
        limit = f" ({restart.left} more restarts within {RESTART_WINDOW_S / 60:g} minutes)"
        self._say(f"{child.name} {child.how_it_ended}; restarting it {when}{'' if evicted else limit}")
        return True

    def _died(self, child: Child) -> Restart | None:
        """Return the restart of a process that has died; None if it may not restart."""
        heard_at, rounds_at = self._local.following.uplink.heard_at, self._local.workers.rounds_at
        last_s = heard_at if child.role is Role.SERVER else rounds_at.get(child.name)
        worked = last_s is not None and last_s > child.started_at
        most, serves = child.command.restarts, child.role.serves
        return self._children.restarts.died(child.name, self._now, most, worked=worked, serves=serves)

    def _is_wanted(self, child: Child) -> bool:
        """Whether a restarted process would have anything to do."""
        if self._way.step is not None:
            return self._way.step.clean and child.role.serves
        evicted = child.status == EvictedError.exit_code  # on joining it learns that the run is over
        return evicted or child.role is Role.SERVER or not self._is_over or self._local.of_run.wanted

    @property
    def _is_over(self) -> bool:
        ended = any(child.role is Role.SERVER and child.status == 0 for child in self._children.here)
        return ended or self._local.of_run.over

    # -- watching ----------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        self._children.dropped = [child for child in self._children.dropped if not child.has_ended(self._now)]
        for child in self._children.alive():
            if not child.has_ended(self._now):
                continue
            if child.role.auxiliary:
                self._lose(child)
                continue
            if child.status == 0 and child.role is Role.WORKER and not child.is_ending:
                self._judge(child)
            is_news = not child.is_ending or (child.fails_by_itself and self._is_wanted(child))
            if child.role is Role.SERVER and child.status == MOVED:
                self._local.following.upon(Event.GONE)
                continue
            if child.status and is_news and not self._schedule_restart(child):
                self._fail(child)

    def _lose(self, child: Child) -> None:
        """Restart a relay that was killed, or say that the run continues without this process."""
        if child.status and not child.is_ending and not (child.role.serves and self._schedule_restart(child)):
            log = child.command.log
            self._say(f"{child.name} {child.how_it_ended}; the run continues without it (see {log})")

    def _judge(self, child: Child) -> None:
        """Check whether a worker whose script ended without an error has trained to the end of the run."""
        self._ended.early.discard(child.name)
        if self._heard_the_end(child):
            return
        if child.name not in self._local.workers.joined:
            child.status = NotTrainedError.exit_code
            return
        self._ended.early.add(child.name)
        self._say(
            f"{child.name} left before the end of the run and has no consensus model: with lsgd.wrap, call "
            f"worker.finish() after the loop; with worker.batches, train until worker.stopped, because the plan "
            f"(iterations, seconds) ends the run, or call worker.leave() for the consensus of all workers that leave"
        )

    def _heard_the_end(self, child: Child) -> bool:
        return self._is_over or child.name in self._local.workers.ended

    def _fail(self, child: Child) -> None:
        odd = child.status == OutlierError.exit_code and child.role is Role.WORKER and not self._heard_the_end(child)
        if odd and self._way.step is None and self._is_needed:
            self._ended.early.add(child.name)
            self._say(f"{child.name} {child.how_it_ended}; the run continues without it (see {child.command.log})")
            return
        if child.status == RunOverError.exit_code and child.role is Role.WORKER:
            if self._ended.is_news(child):  # others are named at the end
                self._say(f"{child.name} {child.how_it_ended}")
            self._ended.late.add(child.name)
            return
        if self._ended.is_news(child):
            log = f"; all that it printed is in {child.command.log}" if child.process.mistake else ""
            self._say(f"{child.name} {child.how_it_ended}{log}")
        if child.role is Role.SERVER and self._local.allegiance.may(Event.FAILED):
            self._local.following.upon(Event.FAILED)
            return
        self._ended.failed = self._ended.failed or child
        if child.role is Role.SERVER or child.status == ServerLostError.exit_code:
            self._local.workers.give_up()  # the others would wait for an answer that will not come
        if self._way.step is None:
            self._end_cleanly()

    def _stop(self, number: signal.Signals) -> None:
        if self._signalled and number is signal.SIGHUP:
            return
        if self._signalled:
            self._end([_Step(tuple(Role), KILL_PATIENCE_S, signal.SIGKILL)])
            return
        self._signalled = number
        if self._way.step:
            self._say(f"{number.name}: the run is already ending; a second signal kills it at once")
            return
        self._say(f"{number.name}: stopping the run, within {STOP_PATIENCE_S:g} s; a second signal kills it at once")
        self._end_cleanly()

    # -- ending ------------------------------------------------------------------------------------------------

    def _end_cleanly(self) -> None:
        """Let the workers complete their last round and save; then end all processes."""
        for name in self._children.due_of(Role.SERVER):
            self._say(f"restarting {name} now, to tell it that the run ends")
        others = set(Role) - {Role.WORKER}
        self._children.due = dict.fromkeys(self._children.due_of(*others), 0.0)
        self._leave_run()
        self._end([_Step((Role.SERVER, Role.WORKER), STOP_PATIENCE_S, clean=True), *self._ends()])

    def _leave_run(self) -> None:
        """Ask for the end of the run; on a node without its server, only for this node's."""
        failed = self._ended.failed
        why = f"{failed.name} {failed.how_it_ended}" if failed else ""
        if self._signalled:
            why = f"lsgd launch of {self._name} got {self._signalled.name}"
        if not self.serves:
            self._local.end(why)
        elif not self._is_over:
            self._local.stop_run(why)
        for child in self._children.alive(Role.SERVER):
            child.is_ending = True

    def _ends(self) -> Iterator[_Step]:
        waits = {Role.WORKER: SAVE_PATIENCE_S, Role.SERVER: LINGER_S, Role.OBSERVER: OBSERVE_PATIENCE_S}
        in_vain = bool(self._local.failure) and not self._local.workers.joined
        for role in Role:
            if role is not Role.WORKER or not in_vain:  # those that have never joined have nothing to save
                yield _Step((role,), waits.get(role, 0.0))
            yield _Step((role,), TERM_PATIENCE_S, signal.SIGTERM)
            yield _Step((role,), KILL_PATIENCE_S, signal.SIGKILL)

    def _end(self, steps: Iterator[_Step] | Sequence[_Step]) -> None:
        self._way.steps = deque(steps)
        self._take_step()

    def _advance(self) -> bool:
        """Take the next steps whose time has come; return whether there is anything left to wait for."""
        if self._way.step is None and not self._is_needed:
            self._end(self._ends())
        while self._way.step and self._is_done(self._way.step):
            if not self._take_step():
                return False
        return True

    @property
    def _is_needed(self) -> bool:
        """Whether the node has a worker, or serves other nodes' workers."""
        roles = (Role.WORKER, Role.SERVER) if self._shared and self.serves else (Role.WORKER,)
        return bool(self._children.alive(*roles) or self._children.due_of(*roles))

    @property
    def _server_is_gone(self) -> bool:
        """Whether the global server was this node's, and has ended for good."""
        children = self._children
        return self.serves and not children.alive(Role.SERVER) and not children.due_of(Role.SERVER)

    def _is_done(self, step: _Step) -> bool:
        """Whether its time is up, or it has nothing left to wait for."""
        if self._now >= self._way.deadline_s:
            return True
        if step.clean:
            return not self._is_needed or (self._server_is_gone and not self._is_over)
        if self._children.alive(*step.roles):
            return False
        says_so = Role.SERVER in step.roles and step.number is not signal.SIGKILL
        return not says_so or self._server_is_gone or self._local.finished

    def _take_step(self) -> bool:
        """Take the next step; return False if there is none."""
        if not self._way.steps:
            self._way.step = self._way.step or _Step((), 0.0)
            if left := ", ".join(f"{child.name} (process {child.process.pid})" for child in self._children.alive()):
                self._say(f"still running after SIGKILL: {left}")
            return False
        step = self._way.next(self._now)
        if step.clean:
            return True
        self._children.due.clear()
        targets = self._children.alive(*step.roles)
        if step.roles == (Role.WORKER,) and not step.number and targets:
            self._give_up(targets)
        if step.roles == (Role.SERVER,) and step.number is signal.SIGTERM:
            self._end_servers()
        if step.number and targets:
            if not all(child.command.role.auxiliary for child in targets):  # those end like this in a healthy run
                self._say(f"{step.number.name} to {', '.join(child.name for child in targets)}")
            for child in targets:
                child.send(step.number)
        return True

    def _give_up(self, workers: Sequence[Child]) -> None:
        names = ", ".join(child.name for child in workers)
        self._say(f"{names}: asked to save a checkpoint and leave within {SAVE_PATIENCE_S:g} s")
        self._local.workers.give_up()
        for child in workers:
            child.is_ending = True

    def _end_servers(self) -> None:
        """Leave the run, which continues although the workers of this node have ended."""
        if self._is_over or self._server_is_gone or self._local.finished:
            return
        self._say("the workers have ended before the end of the run")
        self._local.end(f"the workers of {self._name} have ended")

    def conclude(self) -> tuple[int, str, str]:
        """Print the report of a process that failed; return the exit status, and how the run ended and why.

        The status is 0 if all processes ended by themselves without an error; else that of the first that failed
        (128 + the signal's number, if a signal killed it), or 128 + the number of the signal that we got. It is
        :class:`NotTrainedError`'s if a worker never joined, or if all workers left before the end of the run, and
        :class:`RunOverError`'s if all joined too late. The end
        is ``failed`` or ``stopped``; empty: what the servers say.
        """
        if failed := self._ended.failed:
            assert failed.status is not None
            status = failed.status if failed.status > 0 else 128 - failed.status
            if failed.role is Role.SERVER and self._local.of_run.outcome:  # it has said why before it ended
                return status, "failed", self._local.of_run.outcome
            show(failed.report(), sys.stderr)
            return status, "failed", f"{failed.name} {failed.how_it_ended}"
        if self._local.failure:
            show(f"\nlsgd launch: {self._name}: {self._local.failure}\n", sys.stderr)
            return 1, "failed", self._local.failure
        apart = self._ended.early | self._ended.late
        counted = [child for child in self._children.here if not child.role.auxiliary and child.name not in apart]
        if self._signalled and any(child.status != 0 for child in counted):
            return 128 + self._signalled, "stopped", f"{self._signalled.name}; not all processes ended in time"
        workers = {command.name for command in self._commands if command.role is Role.WORKER}
        if self._ended.early and self._ended.early == workers:
            if odd := next((child for child in self._children.here if child.status == OutlierError.exit_code), None):
                show(odd.report(), sys.stderr)
                return OutlierError.exit_code, "failed", f"{odd.name} {odd.how_it_ended}"
            return (
                NotTrainedError.exit_code,
                "failed",
                "all workers left before the end of the run, so there is no consensus",
            )
        if self._ended.late == workers:
            return RunOverError.exit_code, "failed", "all workers joined too late, so none has trained"
        if self._children.alive():
            return 1, "failed", "some processes did not end"
        late = ", ".join(sorted(self._ended.late))
        late = f"; {late} joined too late, and ended without training" if late else ""
        return 0, "", f"{self._local.of_run.outcome}{late}"
