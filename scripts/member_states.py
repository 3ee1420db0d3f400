"""Writes the table of a worker's states into docs/concepts/protocol.md: ``python scripts/member_states.py [PAGE]``."""

import re
import sys
from pathlib import Path

from lsgd.server.roster import TRANSITIONS, MemberState

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "protocol.md"


def table() -> str:
    """Return the states as the table in the page."""
    rows = ["| state | live | means | left by |", "|---|---|---|---|"]
    for state in MemberState:
        ways = "; ".join(f"{upon} → {after.name}" for before, after, upon in TRANSITIONS if before is state)
        rows.append(f"| {state.name} | {'yes' if state.live else 'no'} | {state.means} | {ways} |")
    rows.append("| (gone) | | left, silent past its lease, name taken over, refused | another process joins |\n")
    return "\n".join(rows)


def renew(page: Path, made: str) -> None:
    """Write a table into a page, in the place of the one with the same head."""
    head, rows = made.split("\n", 1)
    text, found = re.subn(rf"^{re.escape(head)}\n(\|.*\n)+", lambda _: f"{head}\n{rows}", page.read_text(), flags=re.M)
    if found != 1:
        sys.exit(f"{page} has {found} tables that begin with {head}")
    page.write_text(text)


if __name__ == "__main__":
    renew(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, table())
