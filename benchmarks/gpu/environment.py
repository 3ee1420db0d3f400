"""The Python that scripts/gpu.sh runs, on a machine without internet; imports nothing but what every Python has.

``python environment.py python DEVICE [WHEELS]`` prints its path. It is this one if that has everything; else an
environment in build/gpu/python in which this one's packages are there, and the missing ones from a folder of wheels.
``python environment.py download WHEELS RELEASE [PACKAGE...]`` fills such a folder for a release of Python.
"""

import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE = ROOT / "build" / "gpu" / "python"
EXTRAS = {"test": ("hypothesis", "pytest", "pytest-timeout"), "dev": ("pandas",), "examples": ("scikit-learn",)}
"""Of the optional dependencies, what the tests, the trainings and the tables need."""

OF_THE_MACHINE = re.compile(r"torch|numpy|cupy(-\w+)?")
"""Packages that are never replaced."""

GLIBC = range(12, 40)
"""Minor releases whose wheels may be downloaded; pip compares them exactly."""


class LackingError(Exception):
    """Something is missing; the message says what to do."""


def requirements() -> Iterator[str]:
    """Yield what is needed, such as ``pyzmq>=26``."""
    yield from PROJECT["dependencies"]
    for extra, names in EXTRAS.items():
        yield from (text for text in PROJECT["optional-dependencies"].get(extra, ()) if name_of(text) in names)


def name_of(requirement: str) -> str:
    """Return the package of a requirement."""
    return re.split(r"[^\w-]", requirement)[0]


def is_there(requirement: str) -> bool:
    """Return whether a package is installed, in a version that is new enough."""
    least = re.search(r">=([\d.]+)", requirement)
    try:
        found = version(name_of(requirement))
    except PackageNotFoundError:
        return False
    return least is None or _numbers(found) >= _numbers(least[1])


def _numbers(text: str) -> list[int]:
    """Return the numbers that a version begins with."""
    found = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in found[0].split(".")] if found else []


def python_for(device: str, wheels: Path | None) -> Path:
    """Return the Python to run.

    Args:
        device: ``cpu``, or a GPU, which needs CuPy.
        wheels: folder with what is missing; None: nothing is.

    Raises:
        LackingError: something is missing, in this Python or in the folder.
    """
    _check_the_machine(device)
    missing = [text for text in requirements() if not is_there(text)]
    if not missing and is_there("lsgd"):
        return Path(sys.executable)
    names = ", ".join(name_of(text) for text in missing)
    if missing and wheels is None:
        raise LackingError(
            f"{sys.executable} lacks {names}. Give a folder of their wheels: bash scripts/gpu.sh WHEELS. To fill one, "
            f"on a machine with internet: bash scripts/gpu.sh --download WHEELS {_release()} {names.replace(',', '')}"
        )
    return _made(missing, wheels)


def _check_the_machine(device: str) -> None:
    torch = next(text for text in requirements() if name_of(text) == "torch")
    if not is_there(torch):
        raise LackingError(
            f"{sys.executable} has no {torch}; name a Python that has it: PYTHON=/path/to/python bash scripts/gpu.sh"
        )
    if device != "cpu" and not any((each.name or "").startswith("cupy") for each in distributions()):
        raise LackingError(
            f"{sys.executable} has no CuPy, which compiles the kernels: install cupy-cuda12x or cupy-cuda13x, for the "
            "CUDA of torch (python -c 'import torch; print(torch.version.cuda)')"
        )


def _release() -> str:
    return "{}.{}".format(*sys.version_info)


def _made(missing: Sequence[str], wheels: Path | None) -> Path:
    """Make the environment anew and return its Python."""
    print(f"gpu.sh: makes {MADE} for {', '.join(['lsgd', *missing])}; {sys.executable} stays as it is", file=sys.stderr)
    venv.create(MADE, clear=True, symlinks=True)
    packages = MADE / "lib" / f"python{_release()}" / "site-packages"
    own = [path for path in sys.path if path.endswith("-packages")]
    (packages / "machine.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in own))
    (packages / "lsgd.pth").write_text(f"{ROOT}\n")  # what follows is an editable installation, without setuptools
    about = packages / f"lsgd-{PROJECT['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lsgd\nVersion: {PROJECT['version']}\n")
    python = MADE / "bin" / "python"
    if missing:
        _install(python, missing, wheels)
    return python


def _install(python: Path, missing: Sequence[str], wheels: Path | None) -> None:
    """Install wheels with this Python's pip, which takes what is there as it is."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        kept = {each.name: each.version for each in distributions() if OF_THE_MACHINE.fullmatch(each.name or "")}
        pins.writelines(f"{name}=={release}\n" for name, release in kept.items())
        pins.flush()
        options = ["--no-index", "--find-links", str(wheels), "--constraint", pins.name, "--quiet"]
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *missing]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise LackingError(
                f"pip cannot install that from {wheels}, for the reason above; fill the folder on a machine with "
                f"internet: bash scripts/gpu.sh --download WHEELS {_release()}"
            )


def download(wheels: Path, release: str, packages: Sequence[str]) -> None:
    """Download the wheels of packages, and of what they need, for a release of Python.

    Raises:
        LackingError: pip failed.
    """
    tags = [f"manylinux_2_{minor}_{platform.machine()}" for minor in GLIBC] + [f"manylinux2014_{platform.machine()}"]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={release}"]
    options += [f"--platform={tag}" for tag in tags]
    wanted = list(packages) or [text for text in requirements() if not OF_THE_MACHINE.fullmatch(name_of(text))]
    options += ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(wheels)]
    if subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, *wanted]).returncode:
        raise LackingError("pip failed, for the reason above")
    print(f"gpu.sh: {wheels} has {len([*wheels.glob('*.whl')])} wheels for Python {release}; take it to the machine")


def main(arguments: Sequence[str]) -> int:
    """Do what is asked for."""
    verb, first, *others = arguments
    try:
        if verb == "download":
            release, *packages = others or [_release()]
            download(Path(first), release, packages)
        else:
            print(python_for(first, Path(others[0]) if others else None))
    except LackingError as error:
        print(f"gpu.sh: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
