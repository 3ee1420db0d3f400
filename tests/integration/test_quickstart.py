"""What a newcomer types first."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tests import golden

from .running import DEADLINE_S, FORKS, LIGHT

LSGD = [sys.executable, "-m", "lsgd.client"]


def lsgd(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LSGD, *arguments],
        cwd=folder,
        env={**os.environ, **LIGHT, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def forked(folder: Path, *arguments: str, **variables: str) -> tuple[int | None, str]:
    """The same by forks; return the exit code, and the output with the errors."""
    done = FORKS.popen([*LSGD, *arguments], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **variables})
    output, _ = done.communicate()
    return done.returncode, output


@pytest.mark.slow
def test_the_example_trains_without_a_clone_and_leaves_its_script(tmp_path: Path) -> None:
    code, output = forked(tmp_path, "quickstart", "--run-dir", "first", "--device", "cpu", LSGD_ITERATIONS="40")
    assert code == 0, output
    assert json.loads((tmp_path / "first" / "result.json").read_text())["count"] == 40
    script = tmp_path / "first" / "digits.py"
    assert script.read_text() == (files("lsgd.examples") / "digits.py").read_text()
    assert "\x1b" not in output, "no terminal, no colours"
    again = output.splitlines()[-1].split()
    assert again[:2] == ["lsgd", "launch"] and again[-2:] == ["python", "first/digits.py"]
    code, output = forked(tmp_path, *again[1:-2], sys.executable, again[-1], LSGD_ITERATIONS="20")
    assert code == 0, output
    code, output = forked(tmp_path, "quickstart", "--run-dir", "first")
    assert code == 1 and golden.text("quickstart.has_digits") in output


def test_the_shell_completes_what_has_choices(tmp_path: Path) -> None:
    script = lsgd(tmp_path, "completion", "bash").stdout
    assert "_LSGD_COMPLETE=bash_complete" in script
    for words, found in (("lsgd algorithms lea", "leader"), ("lsgd set per", "period"), ("lsgd sta", "status")):
        told = lsgd(tmp_path, _LSGD_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
        assert found in told.stdout, (words, told)
