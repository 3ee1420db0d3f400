"""Who and where this worker is, from lsgd's variables, else torchrun's, else Slurm's; and on which address."""

import multiprocessing
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lsgd import __version__
from lsgd.algorithms import ALGORITHMS
from lsgd.codecs import CODECS
from lsgd.errors import ConfigError
from lsgd.plan.plan import check_variables
from lsgd.protocol.routes import address_towards
from lsgd.protocol.sockets import default_local_address

INDEX_VARIABLES = ("LSGD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True)
class Identity:
    """A worker's place in the run.

    Args:
        index: number on its machine.
        incarnation: random number of this process.
        local_address: address of its machine's local server.
        run_dir: folder of results that the launcher made; None without a launcher.
        resume: folder of checkpoints to resume from, if any.
        restarted: whether it replaces a process that died in the same run.
        stage: which one of the run it comes to, from 1.
    """

    index: int
    incarnation: int
    local_address: str
    run_dir: Path | None
    resume: Path | None = None
    restarted: bool = False
    stage: int = 1

    @property
    def place(self) -> tuple[str, int]:
        """What tells this worker from all others of its machine: a local server, and a number there."""
        return self.local_address, self.index


def identify(environ: Mapping[str, str] = os.environ) -> Identity:
    """Return this process's identity.

    Raises:
        ConfigError: a variable is not a whole number, or starts with ``LSGD_`` and is unknown; or a process of another
            one, such as a loader's, only imports the script.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself looks
        raise ConfigError(
            "this process was started by another one of the script (by spawn or forkserver, for a DataLoader, say), "
            "and only imports the script to begin. What a script does goes into a function, which it calls under "
            '`if __name__ == "__main__":`'
        )
    check_variables(environ)
    run_dir, resume = environ.get("LSGD_RUN_DIR"), environ.get("LSGD_RESUME")
    return Identity(
        index=_index(environ),
        incarnation=secrets.randbits(63),
        local_address=environ.get("LSGD_LOCAL") or default_local_address(),
        run_dir=Path(run_dir) if run_dir else None,
        resume=Path(resume) if resume else None,
        restarted=bool(environ.get("LSGD_RESTARTED")),
    )


def ends_others(environ: Mapping[str, str]) -> bool:
    """Whether what has started this process ends its neighbors if it fails: torchrun, and srun --kill-on-bad-exit."""
    is_launched = "LSGD_NODE" in environ  # a worker of lsgd launch, which does not
    return not is_launched and ("TORCHELASTIC_RUN_ID" in environ or "SLURM_STEP_ID" in environ)


def device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device for this worker's model: ``LSGD_DEVICE``, else the GPU with its number, else the CPU.

    Raises:
        ConfigError: the variable is not a device, or torch cannot use it here.
    """
    index, text = _index(environ), environ.get("LSGD_DEVICE", "")
    if not text:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return torch.device("cuda", index % count) if count else torch.device("cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"the variable LSGD_DEVICE = {text!r} is not a device; write cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"LSGD_DEVICE = {text!r}, but torch (built for CUDA {torch.version.cuda}) finds no usable GPU here"
        )
    return device


def versions() -> dict[str, str]:
    """Return the versions that members compare when they join; empty for what is missing."""
    nccl = ""
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "lsgd": __version__,
        "torch": torch.__version__.partition("+")[0],
        "cuda": torch.version.cuda or "",
        "nccl": nccl,
        **ALGORITHMS.versions(),
        **CODECS.versions(),
    }


def gpu_name(device: torch.device) -> str:
    """Return a GPU's unique name; empty for other devices."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def _index(environ: Mapping[str, str]) -> int:
    for name in INDEX_VARIABLES:
        if name in environ:
            if not environ[name].isdecimal():
                raise ConfigError(f"the variable {name} = {environ[name]!r} is not a whole number from 0")
            return int(environ[name])
    return 0


@dataclass(frozen=True)
class Interface:
    """An address of this machine, the name of its interface, and the reason for this choice."""

    address: str
    name: str
    reason: str


def interface_towards(host: str) -> Interface:
    """Return the interface that this machine's routes use to reach ``host``.

    Raises:
        ConfigError: there is no route.
    """
    try:
        address = address_towards(host)
    except OSError as error:
        raise ConfigError(f"no route to the global server at {host}: {error.strerror}") from None
    return Interface(address, _name_of(address), f"it routes to the global server at {host}")


def _name_of(address: str) -> str:
    """Return the name of the interface with ``address``; all of 127.0.0.0/8 is the loopback's."""
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in found):
            return str(name)
    return "lo" if address.startswith("127.") else "unknown"
