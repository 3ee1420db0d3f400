"""Debian's packages that tests need: scripts/packages.txt lists them, and continuous integration installs them."""

import os
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.testbed import no_nat

LIST = Path(__file__).parents[1] / "scripts" / "packages.txt"
PROGRAMS = {name: rest.split() for name, rest in re.findall(r"^([\w-]+): ([^#\n]+)", LIST.read_text(), re.M)}


def to_install(package: str) -> str:
    """Return the line that brings a package, for the reason of a skip."""
    assert package in PROGRAMS, f"{LIST} does not list it"
    return f"apt-get install --no-install-recommends {package}"


def needs(package: str) -> pytest.MarkDecorator:
    """Return the mark that skips tests where a program of a package is missing."""
    missing = [program for program in PROGRAMS[package] if not shutil.which(program)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not found: {to_install(package)}")


def needs_nat() -> pytest.MarkDecorator:
    """Return the mark that skips tests of hosts behind NAT where root cannot have any."""
    lacking = os.geteuid() == 0 and no_nat()
    return pytest.mark.skipif(bool(lacking), reason=f"{lacking}: {to_install('nftables')}")
