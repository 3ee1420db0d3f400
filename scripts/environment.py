"""Make .venv beside this folder, with lsgd and the extras named as arguments, or find that it is there already.

Runs on the standard library alone. ``.venv/installed.json`` tells what the last installation installed; it is empty
while one is going on, so that an environment whose installation was interrupted is made again from nothing.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed.json"
LOCK = ROOT / ".venv.lock"
REQUIREMENTS = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
HOME = f"Python {sys.version_info.major}.{sys.version_info.minor}, {ROOT}"


def main() -> None:
    """Bring .venv up to date, unless it is."""
    with lock():
        before = read_stamp()
        wanted = {
            "home": HOME,
            "requirements": hashlib.sha256(b"".join(path.read_bytes() for path in REQUIREMENTS)).hexdigest(),
            "extras": sorted({*sys.argv[1:], *before.get("extras", [])}),
        }
        if before == wanted and os.access(PYTHON, os.X_OK):
            return
        if is_unusable(before):
            make()
        install(wanted["extras"])
        STAMP.write_text(json.dumps(wanted), encoding="utf-8")


@contextmanager
def lock() -> Iterator[None]:
    """Hold the lock that lets one process at a time look at .venv and change it."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which is making {VENV}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_stamp() -> dict[str, Any]:
    """Return what the last installation installed: nothing if there was none, or if it was not completed."""
    text = STAMP.read_text(encoding="utf-8") if STAMP.exists() else ""
    return json.loads(text) if text else {}


def is_unusable(stamp: dict[str, Any]) -> bool:
    """Whether .venv has to be made again. One without a stamp was made by hand, and is taken as it is."""
    return not os.access(PYTHON, os.X_OK) or (STAMP.exists() and stamp.get("home") != HOME)


def make() -> None:
    """Make an empty .venv in place of what is there."""
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError as error:
        fail(
            f"{sys.executable} cannot make environments ({error}); on Debian and Ubuntu: "
            f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv"
        )
    VENV.mkdir(exist_ok=True)
    STAMP.write_text("")
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != STAMP:
            path.unlink()
    try:
        venv.create(VENV, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError as error:
        fail(f"{sys.executable} cannot put pip into {VENV}: {(error.output or b'').decode(errors='replace')}")


def install(extras: list[str]) -> None:
    """Install lsgd with ``extras`` into .venv, editable, at the versions of constraints.txt."""
    say(f"installing into {VENV}; this happens once and takes some minutes")
    STAMP.write_text("")
    pip("install", "setuptools")  # builds lsgd, and torch needs it anyway
    project = f".[{','.join(extras)}]" if extras else "."
    pip("install", "--no-build-isolation", "--editable", project)


def pip(*arguments: str) -> None:
    """Run pip of .venv under the constraints."""
    command = [
        str(PYTHON),
        "-m",
        "pip",
        *arguments,
        "--constraint",
        "constraints.txt",
        "--disable-pip-version-check",
    ]
    if status := subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode:
        fail(
            f"pip failed with exit code {status}, for the reason above; mend it and start again, "
            f"or try it by hand in {ROOT}: {shlex.join(command)}"
        )


def say(text: str) -> None:
    """Tell the user, apart from what the scripts themselves print."""
    print(f"environment: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> None:
    """End with an error."""
    say(text)
    raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted; the next call starts again")
        raise SystemExit(130) from None
    except OSError as error:
        fail(str(error))
