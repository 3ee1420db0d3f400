"""The Python examples of the documentation run as they stand: each in a process, or as the two workers of a run.

A comment above an example says how it is run, if not alone: ``<!-- launched: LSGD_ITERATIONS=40 -->``.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from .integration.running import FORKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = re.compile(
    r"(?:<!-- (?:not run: (?P<why>[^>]+)|launched: (?P<launched>[^>]+)) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.M | re.S,
)


def examples():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in EXAMPLE.finditer(text):
            line = text.count("\n", 0, found.start("code")) + 1
            yield pytest.param(found["code"], found["why"], found["launched"], id=f"{page.name}:{line}")


def test_there_are_examples_and_few_are_not_run():
    reasons = [example.values[1] for example in examples()]
    assert len(reasons) >= 4 and reasons.count(None) >= 2


def test_no_python_stands_outside_the_fences():
    """Where no test would run it."""
    found = [p.name for p in PAGES if re.search(r"^    (import|from) \w+", EXAMPLE.sub("", p.read_text()), re.M)]
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize(("code", "why", "launched"), list(examples()))
def test_an_example(code, why, launched, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    compile(code, str(script), "exec")
    if why is None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(script)]
        if launched:
            environment |= dict(each.split("=") for each in launched.split())
            command = [
                sys.executable,
                "-m",
                "lsgd.client",
                "launch",
                "--device",
                "cpu",
                "--workers",
                "2",
                "--",
                *command,
            ]
        done = FORKS.popen(command, cwd=tmp_path, env=environment)
        output, _ = done.communicate()
        assert done.returncode == 0, output
