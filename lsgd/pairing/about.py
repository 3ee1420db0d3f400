"""What a machine says of itself before it trains with another one, and what it has to say about the differences."""

import ast
import hashlib
import importlib.metadata
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from lsgd import __version__
from lsgd.errors import ProtocolError

MAX_FILES, MAX_TEXT = 64, 200
"""How many modules of a script count, and the longest text that a machine may say of itself."""


@dataclass(frozen=True)
class About:
    """A machine, and what it is to run.

    Args:
        name: its host name.
        gpus: how many workers it has on GPUs.
        workers: how many workers it has.
        lsgd, torch: the versions there.
        script: path of the script; empty: the command names none.
        command: the whole command.
        digest: of the script, and of the modules beside it that it imports; empty without a script.
    """

    name: str
    gpus: int
    workers: int
    lsgd: str
    torch: str
    script: str
    command: str
    digest: str

    @classmethod
    def read(cls, message: Any) -> "About":
        """Return what another machine has said of itself.

        Raises:
            ProtocolError: it is something else.
        """
        kinds = {field.name: int if field.type in (int, "int") else str for field in fields(cls)}
        if not isinstance(message, dict) or any(type(message.get(name)) is not kind for name, kind in kinds.items()):
            raise ProtocolError("a machine does not say what it is")
        said = {name: message[name] for name in kinds}
        for name, value in said.items():
            if isinstance(value, str):
                said[name] = "".join(character for character in value if character.isprintable())[:MAX_TEXT]
        return cls(**said)

    def message(self) -> dict[str, Any]:
        """Return it as a message."""
        return asdict(self)

    @property
    def in_words(self) -> str:
        """What others see of it."""
        on = f"{self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else "CPU"
        many = f"{self.workers} worker{'s' * (self.workers != 1)}"
        return f"{many} on {on}, torch {self.torch}, lsgd {self.lsgd}"


def of_this_machine(command: Sequence[str], devices: Sequence[str]) -> About:
    """Return what this machine is, and what it is to run."""
    script = script_of(command)
    return About(
        socket.gethostname(),
        len({device for device in devices if device.startswith("cuda")}),
        len(devices),
        __version__,
        version_of("torch"),
        str(script.absolute()) if script else "",
        shlex.join(command)[:MAX_TEXT],
        digest_of(script) if script else "",
    )


def version_of(package: str) -> str:
    """Return the version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def script_of(command: Sequence[str]) -> Path | None:
    """Return the script in a command: its first word that is a file of Python."""
    return next((Path(word) for word in command if word.endswith(".py") and Path(word).is_file()), None)


def digest_of(script: Path) -> str:
    """Return a digest of a script and of the modules in its folder that it imports, wherever the folder is."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_with_modules(script), key=lambda path: path.relative_to(script.parent).as_posix()):
        with suppress(OSError):
            text = path.read_bytes()
            digest.update(b"%s %d\n" % (path.name.encode(errors="replace") if path != script else b"", len(text)))
            digest.update(text)
    return digest.hexdigest()


def _with_modules(script: Path) -> set[Path]:
    found, new = {script}, [script]
    while new and len(found) < MAX_FILES:
        for name in _imports(new.pop()):
            stem = script.parent / Path(*name.split("."))
            for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                if path.is_file() and path not in found:
                    found.add(path)
                    new.append(path)
    return found


def _imports(path: Path) -> Iterator[str]:
    """Yield the names of the modules that a file may import."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.isidentifier())


def differences(mine: About, other: About) -> tuple[list[str], list[str]]:
    """Return what would make the machines train different things, and what may be noticed later; with what to type.

    ``mine``: of the machine whose user is told; ``other``: of the one with the run.
    """
    wrong, noted = [], []
    if mine.digest != other.digest:
        copy = f": scp {other.name}:{shlex.quote(other.script)} {shlex.quote(mine.script)}" if other.script else ""
        wrong.append(f"the script (or a module beside it) is another one than {other.name}'s; take that one{copy}")
    elif mine.command != other.command:
        noted.append(f"{other.name} runs `{other.command}`, and this machine `{mine.command}`")
    if mine.lsgd != other.lsgd:
        wrong.append(f"{other.name} has lsgd {other.lsgd}, and this machine {mine.lsgd}: install the same one on both")
    if mine.torch != other.torch:
        releases = {tuple(about.torch.split(".")[:2]) for about in (mine, other)}  # of another one workers are refused
        same = other.torch.partition("+")[0]
        line = f"{other.name} has torch {other.torch}, and this machine {mine.torch}: pip install torch=={same}"
        (wrong if len(releases) > 1 else noted).append(line)
    return wrong, noted


def addresses() -> list[str]:
    """Return the IPv4 addresses at which other machines may reach this one."""
    found = []
    states = psutil.net_if_stats()
    for interface, entries in psutil.net_if_addrs().items():
        if interface in states and not states[interface].isup:
            continue
        found += [entry.address for entry in entries if entry.family == socket.AF_INET]
    return [address for address in found if not address.startswith("127.")]
