"""The layers of the package: each imports only from those before it. And what only one module may touch."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lsgd"
LAYERS = (
    "errors built",
    "lazy output payload processors registry election settings shards probe digests means observer stacks script_lines",
    "scattered layers",
    "flat",
    "learning_rate schedulers",
    "protocol",
    "kernels",
    "codecs",
    "collectives",
    "algorithms",
    "plan",
    "ddp_hook",
    "testing",
    "run_folder",
    "store",
    "server",
    "watch",
    "node",
    "client/control client/data client/room",
    "client/groups",
    "client/checkpoint",
    "client/iteration",
    "client/worker client/optimizer",
    "client/wrap",
    "integrations",
    "check",
    "pairing",
    "cli",
    "server/cli",
    "client/__init__ client/__main__ server/__main__ __init__",
    "examples",
)
"""From the ground up. Those in one line do not import one another, but for a folder its own modules."""

APART = {"client": ("server", "node"), "server": ("client",), "node": ("client",)}
"""Who may not import whom, whatever the layers say: they speak by messages only."""

TOGETHER = {"client/control/solo.py"}
"""Where APART does not hold: a script that runs alone has the servers in its own process."""

ONLY_IN = {
    "zmq": {"protocol/sockets.py", "protocol/gate.py"},
    "cupy": {"kernels/cuda/launch.py"},
    "matplotlib": {"watch/curve.py"},
    "tornado": {"watch/dashboard/server.py"},
    "plotly": {"watch/dashboard/page.py"},
    "transformers": {"integrations/transformers.py"},
    "accelerate": {"integrations/accelerate.py", "integrations/transformers.py"},
    "lightning": {"integrations/lightning.py"},
    "ray": {"integrations/ray.py", "integrations/ray_servers.py"},
    "prometheus_client": {"watch/metrics.py"},
    "tensorboardX": {"watch/curves.py"},
    "wandb": {"watch/curves.py"},
    "fsspec": {"store/objects.py"},
    "spake2": {"pairing/proof.py"},
    "zeroconf": {"pairing/discovery.py"},
}
PRIVATE_NAMES_ONLY_IN = {
    "client/groups/torch_group.py",
    "client/groups/store.py",
}


def files(folder: str = "") -> list[Path]:
    """Return the modules of the package, or of one of its folders."""
    found = [path for path in (PACKAGE / folder).rglob("*.py") if "__pycache__" not in path.parts]
    assert found
    return found


def named(path: Path) -> str:
    """Return a module's path in the package."""
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def imports(path: Path) -> list[str]:
    """Return the full name of each thing that a module imports, wherever in it, but for types alone."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {id(inner) for node in types for child in node.body for inner in ast.walk(child)}
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> int | None:
    """Return the number of the layer of ``client/worker.py`` or ``lsgd.client.worker.Worker``; None: not ours."""
    if module.startswith("lsgd."):
        module = module.removeprefix("lsgd.").replace(".", "/")
    elif not module.endswith(".py"):
        return None
    where = f"{module.removesuffix('.py')}/"
    found = [
        (len(room), number)
        for number, layer in enumerate(LAYERS)
        for room in layer.split()
        if where.startswith(f"{room}/")
    ]
    if not found and module == "client/Worker":
        return layer_of("client/worker.py")
    return max(found)[1] if found else -1  # the longest; -1: lsgd itself, which has the version alone


def room(module: str) -> str:
    """Return the folder, or the module at the top, that a layer's arrows are between."""
    number = layer_of(module)
    assert number is not None
    where = module.removeprefix("lsgd.").replace(".", "/") + "/"
    return next((r for r in LAYERS[number].split() if where.startswith((f"{r}/", f"{r}.py"))), "")


def test_every_module_has_a_layer():
    assert [name for path in files() if layer_of(name := named(path)) == -1 and name != "__init__.py"] == []


def test_layers_import_only_from_those_before_them():
    wrong = []
    for path in files():
        own = layer_of(named(path))
        for name in imports(path):
            theirs = layer_of(name)
            if theirs is None or theirs < own or (theirs == own and room(name) == room(named(path))):
                continue
            wrong.append(f"{named(path)}: {name}")
    assert wrong == []


@pytest.mark.parametrize("room", APART)
def test_servers_and_clients_do_not_know_each_other(room):
    wrong = [
        f"{named(path)}: {name}"
        for path in files(room)
        if named(path) not in TOGETHER
        for name in imports(path)
        if name.startswith(tuple(f"lsgd.{other}." for other in APART[room]))
    ]
    assert wrong == []


@pytest.mark.parametrize("module", ONLY_IN)
def test_a_library_belongs_to_one_place(module):
    users = {named(path) for path in files() for name in imports(path) if name.split(".")[0] == module}
    assert users == ONLY_IN[module]


def test_servers_import_no_torch():
    wrong = [
        f"{named(path)}: {name}"
        for folder in ("server", "protocol", "plan")
        for path in files(folder)
        for name in imports(path)
        if name.split(".")[0] == "torch"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    [
        "lsgd.server.cli",
        "lsgd.server.coordinator",
        "lsgd.plan.plan",
        "lsgd.protocol.messages",
        "lsgd.algorithms",
        "lsgd.codecs",
        "lsgd.client.iteration.grants",
    ],
)
def test_modules_that_load_no_torch(module):
    """Not through others either, nor by reading all settings: a server is small and starts at once."""
    look = "from lsgd.algorithms import ALGORITHMS as a; from lsgd.codecs import CODECS as c"
    use = "[cls().sent_nbytes(10, 2) for cls in a.values()], [cls().nbytes(10) for cls in c.values()]"
    code = f"import sys, {module}; {look}; {use}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_private_names_of_torch_distributed_are_in_two_modules():
    users = {named(path) for path in files() if any(is_private(name) for name in names(path))}
    assert users == PRIVATE_NAMES_ONLY_IN


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
            full |= {alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imports(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            yield f"{full.get(head) or head}.{rest}"


def test_the_map_in_the_docs_names_every_module() -> None:
    """docs/design.md: a folder's line names what is in it, unless these are one file each."""
    drawn = re.search(r"^```\n(lsgd/ .*?)^```", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.S | re.M)
    assert drawn
    rooms = re.split(r"^ *(\w+)/ ", drawn[1], flags=re.M)
    for folder, words in zip(rooms[1::2], rooms[2::2], strict=True):
        (place,) = [PACKAGE] if folder == "lsgd" else [p for p in PACKAGE.rglob(folder) if p.is_dir()][:1]
        modules = {path.stem for path in place.glob("[a-z]*.py")}
        assert modules and ("one file each" in words or modules <= set(re.findall(r"\w+", words))), folder
