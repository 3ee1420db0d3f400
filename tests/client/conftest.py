"""What tests of an operator's commands and pages have in common."""

from collections.abc import Iterator

import pytest

from ..integration.running import Cluster


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A global server and one node without workers."""
    made = Cluster(tmp_path_factory.mktemp("servers"))
    made.start("--workers", "2", "--algorithm", "local", "--period", "8", "--iterations", "100")
    yield made
    made.close()
