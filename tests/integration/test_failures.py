"""What a test that fails says: what its processes wait for, and which test has left a file open; and its costs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import golden

TESTS = Path(__file__).parents[1]

FAILS = """
import os, socket, sys
from pathlib import Path
from .integration.running import FORKS

def test_leaks():
    a = [socket.socket()]
    a.append(a)

def test_leaks_and_fails():
    leaked = open("/dev/null")
    assert not leaked

def test_waits(tmp_path):
    (tmp_path / "waits.py").write_text(
        "import threading\\n"
        "def in_vain():\\n"
        "    print('waits', flush=True)\\n"
        "    threading.Event().wait()\\n"
        "in_vain()\\n"
    )
    waits = FORKS.popen([sys.executable, "waits.py", "a word"], cwd=tmp_path, env=os.environ)
    try:
        assert waits.stdout.readline() == "waits\\n"
        waits.communicate(0.1)
    finally:
        TIDY.append(waits)

TIDY = []

def test_is_innocent():
    for waits in TIDY:
        waits.kill()
        waits.wait()
        waits.stdout.close()
"""


@pytest.mark.slow
def test_each_failure_is_its_own_and_shows_what_is_waited_for(tmp_path: Path) -> None:
    """With the real configuration and helpers, in a folder whose tests fail."""
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "integration").mkdir(parents=True)
    for path in (*TESTS.glob("[!t]*.py"), *TESTS.glob("integration/[!t]*.py")):
        shutil.copy(path, tmp_path / path.relative_to(TESTS.parent))
    for folder in ("sentences", "integration/light"):
        shutil.copytree(TESTS / folder, tmp_path / "tests" / folder)
    shutil.copytree(TESTS.parent / "scripts", tmp_path / "scripts")
    (tmp_path / "tests" / "test_fails.py").write_text(FAILS)
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    environ = {name: value for name, value in environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "tests/test_fails.py", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += [f"--costs={tmp_path / 'costs'}"]
    output = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True).stdout
    print(output)
    wrong = {tuple(found) for found in re.findall(r"^(FAILED|ERROR) \S+::(\w+)", output, re.MULTILINE)}
    assert wrong == {
        *(("ERROR", "test_leaks"), ("FAILED", "test_leaks_and_fails"), ("ERROR", "test_leaks_and_fails")),
        ("FAILED", "test_waits"),
    }
    story = output.partition("what still runs")[2]
    assert "waits.py 'a word'" in story and "in in_vain" in story and "in wait" in story
    assert re.search(golden.pattern("exchange.slower"), output)
    costs = re.findall(r"^([\d.]+) tests/test_fails.py::(\w+) call$", (tmp_path / "costs").read_text(), re.MULTILINE)
    assert [test for _, test in costs] == ["test_leaks", "test_leaks_and_fails", "test_waits", "test_is_innocent"]
    assert float(dict(map(reversed, costs))["test_waits"]) > 0.3, (
        "it has started a server of forks, which imports torch"
    )
