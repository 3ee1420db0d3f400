"""What tests need beyond the extras examples and test: packages of Python, and Debian's (scripts/packages.txt).

A file that needs some of Python's stands in ``PACKAGES``: its tests are slow (CONTRIBUTING.md), and skipped without.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.testbed import no_nat

LIST = Path(__file__).parents[1] / "scripts" / "packages.txt"
PACKAGES = {
    "client/test_streams.py": ("webdataset", "datasets", "torchdata"),
    "deploy/test_kubernetes.py": ("yaml", "kubernetes_validate", "kubeflow_trainer_api"),
    "integration/test_accelerate.py": ("accelerate", "transformers"),
    "integration/test_dashboard_page.py": ("tornado", "plotly", "playwright"),
    "integration/test_lightning.py": ("lightning",),
    "integration/test_ray.py": ("ray",),
    "integration/test_schedule_free.py": ("schedulefree",),
    "integration/test_transformers.py": ("transformers",),
    "node/test_logging.py": ("tensorboardX",),
    "store/test_hub.py": ("huggingface_hub",),
    "test_benchmark_convergence.py": ("pandas",),
    "test_benchmarks.py": ("pandas",),
    "test_gpu.py": ("pandas",),
    "watch/test_dashboard.py": ("tornado", "plotly", "prometheus_client"),
    "watch/test_metrics.py": ("prometheus_client",),
}
"""Files of tests, and what they import. ``bash scripts/test.sh --all`` installs it."""


class Module(pytest.Module):
    """A file of tests that needs packages."""

    packages: Sequence[str] = ()

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        """Collect it, or skip it with the reason."""
        missing = [name for name in self.packages if not find_spec(name)]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: bash scripts/test.sh --all", allow_module_level=True)
        return super().collect()


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
