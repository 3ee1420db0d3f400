"""Writes the table of a worker's phases into docs/design.md: ``python scripts/member_states.py [PAGE]``."""

import re
import sys
from pathlib import Path

from lsgd.server.member_states import table

PAGE = Path(__file__).parents[1] / "docs" / "design.md"

if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    head, rows = table().split("\n", 1)
    text, found = re.subn(rf"^{re.escape(head)}\n(\|.*\n)+", lambda _: f"{head}\n{rows}", page.read_text(), flags=re.M)
    if found != 1:
        sys.exit(f"{page} has {found} tables that begin with {head}")
    page.write_text(text)
