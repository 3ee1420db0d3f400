"""The wheel and the sdist: what is in them, and that they work where the checkout is not."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .integration.running import free_port

ROOT = Path(__file__).parents[1]
LINKS = {"server": "lsgd/server", "client": "lsgd/client", "kernels": "lsgd/kernels", "lsgd/examples": "../examples"}
"""The links of the checkout, and what they say."""
ENTRY_POINTS = {"lsgd": "lsgd.cli.commands:main", "lsgd-server": "lsgd.server.cli:main"}


def modules() -> set[str]:
    """Return the files of the package as they are to be installed."""
    kinds = ("*.py", "*.cu", "*.css", "*.html", "*.js", "*.toml")
    found = (path for kind in kinds for path in (*(ROOT / "lsgd").rglob(kind), *(ROOT / "lsgd/examples").glob(kind)))
    return {str(path.relative_to(ROOT)) for path in found} | {"lsgd/py.typed"}


slow = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both from a copy as a zip download makes it, the wheel from the sdist; return the folder they are in.

    Where the checkout has links, such a copy has text files, which is what Python's zipfile makes of them.
    """
    copy = tmp_path_factory.mktemp("clean") / "checkout"
    clutter = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=clutter)
    for name in LINKS:
        (copy / name).unlink()
        (copy / name).write_text(LINKS[name])
    dist = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return dist


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, and return its Python."""
    (wheel,) = built.glob("*.whl")
    return install(wheel, tmp_path_factory.mktemp("environment"))


def install(archive: Path, home: Path) -> Path:
    """Install an archive in a new environment that has its dependencies and no lsgd, and return that one's Python.

    Only the packages of the environment that runs this test are lent to it, not the checkout.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    ours = ("lsgd", "__editable__", "_lsgd", "distutils-precedence")
    for path in Path(importlib.metadata.distribution("torch").locate_file("")).iterdir():
        if not path.name.startswith(ours):
            (Path(purelib) / path.name).symlink_to(path)
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", archive]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return python


def run(python: Path, *arguments: str) -> str:
    """Run the Python of the environment away from the checkout and return what it printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, *arguments],
        cwd=python.parent,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@slow
def test_wheel_has_the_package_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        metadata = {name for name in names if ".dist-info/" in name}
        assert names - metadata == modules()
        (entry_points,) = (name for name in metadata if name.endswith("entry_points.txt"))
        text = wheel.read(entry_points).decode()
    assert {f"{name} = {target}" for name, target in ENTRY_POINTS.items()} <= set(text.splitlines())
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


@slow
def test_sdist_has_what_the_wheel_is_built_from(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        members = sdist.getmembers()
    assert all(member.isfile() or member.isdir() for member in members), "links do not survive everywhere"
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg"} | {name for name in names if name.startswith("lsgd.egg-info/")}
    assert names - generated == modules() | {"pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"}


@slow
def test_two_builds_of_a_commit_are_equal_and_know_it(tmp_path):
    commit = subprocess.run(["git", "log", "-1", "--format=%h of %cs"], cwd=ROOT, capture_output=True, text=True)
    if commit.returncode:
        pytest.skip("this is no checkout of git")
    for name in ("first", "second"):
        subprocess.run(["bash", ROOT / "scripts/release.sh", "build", tmp_path / name], check=True)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("first", "second"))
    assert first == second and len(first) == 2
    (wheel,) = (tmp_path / "first").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert f'COMMIT = "{commit.stdout.strip()}"' in archive.read("lsgd/built.py").decode()


@slow
def test_commands_of_the_installed_wheel(installed):
    for name in ENTRY_POINTS:
        assert "Usage: " in run(installed, str(installed.parent / name), "--help")
    assert importlib.metadata.version("lsgd") in run(installed, "-m", "lsgd.server", "--version")
    assert "algorithm.name" in run(installed, "-m", "lsgd.client", "config", "show")


def test_the_links_of_the_checkout_lead_to_folders():
    for name, target in LINKS.items():
        assert str((ROOT / name).readlink()) == target and (ROOT / name).is_dir()


def test_a_citation_names_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


@slow
@pytest.mark.timeout(300)
def test_the_wheel_of_the_sdist_trains_the_example_and_then_on_two_nodes(installed, tmp_path):
    """As a newcomer does it, and in the folder where quickstart leaves the script."""
    lsgd = installed.parent / "lsgd"
    assert f"lsgd {importlib.metadata.version('lsgd')}" in run(installed, str(lsgd), "--version")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"OMP_NUM_THREADS": "1", "LSGD_ITERATIONS": "60"}
    quick = [lsgd, "quickstart", "--device", "cpu", "--run-dir", "first"]
    subprocess.run(quick, cwd=tmp_path, env=environ, check=True, capture_output=True)
    options = [
        "--nodes",
        "2",
        "--address",
        "127.0.0.1",
        "--port",
        str(free_port()),
        "--workers",
        "1",
        "--device",
        "cpu",
    ]
    nodes = [
        subprocess.Popen(
            [
                lsgd,
                "launch",
                "--node",
                str(node),
                *options,
                "--run-dir",
                f"node{node}",
                "--",
                installed,
                "first/digits.py",
            ],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    told = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(told)
    result = json.loads((tmp_path / "node0" / "result.json").read_text())
    assert (result["count"], result["nodes"]) == (60, 2)


@slow
def test_every_module_of_the_installed_wheel_can_be_imported(installed):
    names = [name.removesuffix(".py").replace("/", ".") for name in sorted(modules()) if name.endswith(".py")]
    runs = ("__main__", *(f"lsgd.examples.{path.stem}" for path in (ROOT / "examples").glob("*.py")))
    names = [name.removesuffix(".__init__") for name in names if not name.endswith(runs)]
    names += ["lsgd.examples.digits"]
    code = "\n".join(f"import {name}" for name in names) + "\nprint(lsgd.__file__)"
    where = Path(run(installed, "-P", "-c", code).strip())
    assert where.is_relative_to(installed.parents[1])


@slow  # with the packages of all extras
def test_constraints_pin_every_dependency():
    """Each package that an installation with any extra but CUDA's brings, by its exact version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = (
        "accelerate",
        "dashboard",
        "dev",
        "docs",
        "examples",
        "lightning",
        "metrics",
        "ray",
        "store",
        "tensorboard",
        "test",
        "transformers",
        "wandb",
    )
    wanted = project["dependencies"] + [requirement for extra in tested for requirement in extras[extra]]
    missing = set(closure(wanted)) - set(pinned)
    assert missing == set()
    for requirement in map(Requirement, wanted + extras["cuda12"] + extras["cuda13"]):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} and {version}"


def closure(texts: list[str]) -> list[str]:
    """Return the names of these requirements and of all that they require in turn here."""
    found: list[str] = []
    waiting = [Requirement(text) for text in texts]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or re.match("nvidia-|cuda-|triton", name):
            continue
        found.append(name)
        for text in importlib.metadata.requires(name) or []:
            child = Requirement(text)
            if child.marker is None or any(
                child.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                waiting.append(child)
    return found
