"""The rooms: kernels <- lsgd <- {server, client}, and what only one module may touch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("lsgd", "server", "client", "kernels")
MAY_IMPORT = {
    "kernels": {"kernels", "errors"},
    "lsgd": {"lsgd", "errors", "kernels"},
    "server": {"server", "lsgd", "errors", "kernels"},
    "client": {"client", "lsgd", "errors", "kernels"},
}
ONLY_IN = {
    "zmq": "lsgd/sockets.py",
    "cupy": "kernels/cuda.py",
}
PRIVATE_NAMES_ONLY_IN = "client/groups.py"


def files(room: str) -> list[Path]:
    """Return the modules of a room; the links in lsgd/ lead to the other rooms and are left out."""
    found = [path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts]
    if room == "lsgd":
        found = [path for path in found if path.relative_to(ROOT).parts[1] not in ROOMS]
    assert found
    return found


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of each thing that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """Return the room of an imported name; None if it is not ours."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    if first != "lsgd":
        return None
    if second == "errors":  # the floor that all rooms stand on; it imports nothing
        return "errors"
    return second if second in ROOMS else "lsgd"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_in_one_direction(room):
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(room)
        for name in imports(path)
        if room_of(name) not in {None, *MAY_IMPORT[room]}
    ]
    assert wrong == []


@pytest.mark.parametrize("module", ONLY_IN)
def test_a_library_belongs_to_one_module(module):
    users = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in files(room)
        for name in imports(path)
        if name.split(".")[0] == module
    }
    assert users == {ONLY_IN[module]}


def test_servers_import_no_torch():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files("server")
        for name in imports(path)
        if name.split(".")[0] == "torch"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["lsgd.server.cli", "lsgd.server.coordinator", "lsgd.plan", "lsgd.messages"]
)
def test_modules_that_load_no_torch(module):
    """Not through others either: a server is small and starts at once."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_private_names_of_torch_distributed_are_in_one_module():
    users = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in files(room)
        if any(is_private(name) for name in names(path))
    }
    assert users == {PRIVATE_NAMES_ONLY_IN}


def is_private(name: str) -> bool:
    """Whether a dotted name is a private one of torch.distributed."""
    return name.startswith(("torch.distributed.", "torch._C._distributed")) and any(
        part.startswith("_") for part in name.split(".")
    )


def names(path: Path) -> Iterator[str]:
    """Yield what a module imports and the attributes that it uses, as full names: ``torch.distributed.Store``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    full = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {
                alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imports(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            yield f"{full.get(head) or head}.{rest}"
