"""The tables of states in docs/concepts are those that the code holds to."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.state_tables import FOLDER, TABLES

SCRIPT = Path(__file__).parents[1] / "scripts" / "state_tables.py"


@pytest.mark.parametrize("page", TABLES)
def test_the_page_has_the_tables(page: str) -> None:
    for table in TABLES[page]:
        assert table() in (FOLDER / page).read_text(), "make it anew: python scripts/state_tables.py"


def test_the_script_makes_them_anew(tmp_path: Path) -> None:
    for page, tables in TABLES.items():
        text = Path(shutil.copy(FOLDER / page, tmp_path)).read_text()
        for table in tables:
            row = table().splitlines()[2]
            assert text.count(row) == 1
            text = text.replace(row, "| OLD | | |")
        (tmp_path / page).write_text(text)
    subprocess.run([sys.executable, SCRIPT, tmp_path], check=True)
    for page in TABLES:
        assert (tmp_path / page).read_text() == (FOLDER / page).read_text()
