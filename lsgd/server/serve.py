"""Serves a run as its global server, in this process."""

import errno
from contextlib import closing
from pathlib import Path

from lsgd import __version__
from lsgd.errors import ConfigError
from lsgd.output import write_whole
from lsgd.plan.plan import Plan
from lsgd.protocol.credentials import run_certificate, secret_of_relay, secret_of_run
from lsgd.protocol.keys import KeyRing, is_local
from lsgd.protocol.messages import Endpoint
from lsgd.protocol.sockets import Listener
from lsgd.server.coordinator import Coordinator
from lsgd.server.daemon import Ending, complain, say, tell
from lsgd.server.global_daemon import GlobalDaemon
from lsgd.server.inputs import Inputs
from lsgd.server.journal import Journal, open_run
from lsgd.server.reasons import number_of
from lsgd.server.report import Record
from lsgd.server.standbys import Standbys
from lsgd.server.tenure import Access

_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a disk that may pass soon."""


def serve_global(
    plan: Plan,
    address: str,
    keys: KeyRing | None,
    save_plan: Path | None,
    journal_path: Path | None,
    results: Path | None,
    ending: Ending,
    *,
    relay: str = "",
    continues: bool = False,
    launched: bool = False,
    run: str = "",
    node: int = 0,
) -> int:
    """Serve a run until it is over, or ``ending`` begins, and return the exit code.

    Args:
        plan: plan of a new run.
        address: where to listen.
        keys: keys of those that may connect; None: everybody may.
        save_plan: file for the plan as used.
        journal_path: file that keeps the run, and from which an unfinished one continues.
        results: folder for the rounds and the result.
        ending: what asks this server to end.
        relay: address of the relay beside it, if any.
        continues: whether to continue the run in the journal, or to raise.
        launched: whether others say how nodes join.
        run: identity of a new run; empty: one that no other has.
        node: where that begins.

    Raises:
        ConfigError: the address, a file, or the journal cannot be used.
    """
    journal = Journal(journal_path) if journal_path else None
    with Listener(address, keys) as listener:
        coordinator = Coordinator(open_run(plan, journal, continues=continues, run=run, node=node))
        state = coordinator.state
        certificate = (keys.certificate or run_certificate(keys.secret, state.run)) if keys else b""
        secret = secret_of_run(relay_secret(keys), state.run.encode()) if relay else b""
        state.tenure.access = Access(certificate, relay, secret)
        if save_plan:
            _save_plan(state.plan, save_plan, continued=journal is not None and journal.resumed)
        _announce(listener.address, state.plan, keys.folder if keys else None, launched=launched)
        record = Record(results, state.run) if results else None
        standbys = None
        if state.plan.run.failover == "auto":
            own = Endpoint(state.tenure.term.node, listener.address, keys.public if keys else b"")
            standbys = Standbys(own, keys.listed if keys else None)
        with closing(Inputs(results)) as inputs:
            return GlobalDaemon(coordinator, listener, journal, record, standbys=standbys, inputs=inputs).run(ending)


def _announce(address: str, plan: Plan, keys: Path | None, *, launched: bool) -> None:
    """Print where the server listens, who may connect, how to join it, and how to end a run without an end.

    ``launched``: ``lsgd launch`` says how to join, and its run folder is where ``lsgd stop`` looks.
    """
    listens_on, trusts = address, "" if keys or is_local(address) else " --insecure"
    for wildcard in ("//0.0.0.0:", "//[::]:"):
        address = address.replace(wildcard, "//ADDRESS-OF-THIS-MACHINE:")
    workers, nodes = plan.run.workers, plan.run.nodes
    waits = number_of(workers, "worker") if workers else f"the workers of {number_of(nodes, 'node')}"
    token = f" --token nodeN.token, from {keys}" if keys else trusts
    how = f"; join from each machine with: lsgd-server --local --node N --connect {address}{token}"
    say(
        f"lsgd {__version__} global server on {listens_on}, {plan.algorithm.name}, waits for {waits}"
        f"{'' if launched else how}"
    )
    if not plan.run.has_end:
        where = "" if launched else f" --connect {address}{trusts}"
        tell(
            f"the plan has no end (neither iterations nor seconds): scripts of lsgd.wrap end the run with their own "
            f"loops; end others with: lsgd stop{where}, or give them an end: lsgd set{where} iterations=N (of all "
            f"workers together)"
        )


def _save_plan(plan: Plan, path: Path, *, continued: bool) -> None:
    """Write the plan; a full disk leaves the previous file, and does not end the run.

    Raises:
        ConfigError: it can never be written there; for a ``continued`` run this is only logged.
    """
    try:
        write_whole(path, plan.to_toml())
    except OSError as error:
        trouble = f"the plan cannot be written to {path}: {error.strerror}"
        if not continued and error.errno not in _PASSING:
            raise ConfigError(trouble) from None
        complain(f"{trouble}; the run continues without that file")


def relay_secret(keys: KeyRing | None) -> bytes:
    """Return the secret of the relay beside a global server with these keys; without keys, anybody knows it."""
    return secret_of_relay(keys.secret if keys else b"")
