"""Writes the tables of states into their pages in docs/concepts: ``python scripts/state_tables.py [FOLDER]``."""

import re
import sys
from pathlib import Path

from lsgd.client.iteration import rounds, step
from lsgd.node import allegiance
from lsgd.server import life
from lsgd.server.roster import TRANSITIONS, MemberState

FOLDER = Path(__file__).parents[1] / "docs" / "concepts"


def members() -> str:
    """Return a worker's states as the table in protocol.md."""
    rows = ["| state | live | means | left by |", "|---|---|---|---|"]
    for state in MemberState:
        ways = "; ".join(f"{upon} → {after.name}" for before, after, upon in TRANSITIONS if before is state)
        rows.append(f"| {state.name} | {'yes' if state.live else 'no'} | {state.means} | {ways} |")
    rows.append("| (gone) | | left, silent past its lease, name taken over, refused | another process joins |\n")
    return "\n".join(rows)


def lives() -> str:
    """Return the states of a run as the table in protocol.md."""
    rows = ["| state | shown as | means | left by |", "|---|---|---|---|"]
    for state, ways in life.TRANSITIONS.items():
        left = "; ".join(f"{upon} → {after.name}" for after, upon in ways.items())
        rows.append(f"| {state.name} | {state.shown} | {state.means} | {left or 'nothing'} |")
    return "\n".join([*rows, ""])


def allegiances() -> str:
    """Return what a node can be as the table in failover.md."""
    rows = ["| state | own servers | means: the node | left by |", "|---|---|---|---|"]
    for state, ways in allegiance.TRANSITIONS.items():
        others = (way for way in ways.items() if way[1] is not state and way[0] is not allegiance.Event.END)
        left = "; ".join(f"{upon.value} → {after.name}" for upon, after in others)
        rows.append(f"| {state.name} | {'run' if state.servers else ''} | {state.means} | {left} |")
    return "\n".join([*rows, ""])


def step_states() -> str:
    """Return the states of a worker's step as the table in worker.md."""
    rows = ["| state of a step | means | left by |", "|---|---|---|"]
    for state in step.StepState:
        ways = "; ".join(
            f"`{event.name}` → {after.name}" for (before, event), after in step.TRANSITIONS.items() if before is state
        )
        rows.append(f"| {state.name} | {state.value} | {ways or 'nothing'} |")
    return "\n".join([*rows, ""])


def step_events() -> str:
    """Return the events of a worker's step as the table in worker.md."""
    rows = ["| event of a step | upon |", "|---|---|", *(f"| `{each.name}` | {each.value} |" for each in step.Event)]
    return "\n".join([*rows, ""])


def phases() -> str:
    """Return the phases of a round as the table in worker.md."""
    words = [(phase.__name__.strip("_"), (phase.__doc__ or "").splitlines()[0]) for phase in rounds.PHASES]
    rows = [f"| `{name}` | {text[0].lower()}{text[1:].rstrip('.')} |" for name, text in words]
    return "\n".join(["| phase of a round | what it does |", "|---|---|", *rows, ""])


TABLES = {
    "protocol.md": (members, lives),
    "failover.md": (allegiances,),
    "worker.md": (step_states, step_events, phases),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for page, tables in ((folder / name, tables) for name, tables in TABLES.items()):
        for table in tables:
            head, rows = table().split("\n", 1)
            anew, text = f"{head}\n{rows}", page.read_text()
            text, found = re.subn(rf"^{re.escape(head)}\n(\|.*\n)+", lambda _, anew=anew: anew, text, flags=re.M)
            if found != 1:
                sys.exit(f"{page} has {found} tables that begin with {head}")
            page.write_text(text)
