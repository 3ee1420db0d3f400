"""Writes the table of a worker's step into docs/concepts/worker.md: ``python scripts/step_states.py [PAGE]``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts is no installed package

from lsgd.client.iteration.step import TRANSITIONS, Event, StepState
from scripts.member_states import renew

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "worker.md"


def tables() -> list[str]:
    """Return the events and the states as the tables in the page."""
    events = ["| event of a step | upon |", "|---|---|", *(f"| `{event.name}` | {event.value} |" for event in Event)]
    states = ["| state of a step | means | left by |", "|---|---|---|"]
    for state in StepState:
        ways = "; ".join(
            f"`{event.name}` → {after.name}" for (before, event), after in TRANSITIONS.items() if before is state
        )
        states.append(f"| {state.name} | {state.value} | {ways or 'nothing'} |")
    return ["\n".join([*rows, ""]) for rows in (states, events)]


if __name__ == "__main__":
    for each in tables():
        renew(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, each)
