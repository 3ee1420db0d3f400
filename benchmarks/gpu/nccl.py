"""Part 5: lsgd's groups over NCCL with as many GPUs as there are: formed, aborted, formed again.

``python -m benchmarks.gpu.nccl BACKEND RANK SIZE FOLDER`` is one member. Gloo takes NCCL's place on a CPU.
"""

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore

from benchmarks.gpu.cases import Case, Finding, Part, Setup, in_folder
from benchmarks.testbed.launch import await_all, start
from lsgd.client.groups.torch_group import ProcessGroups, gloo_group, nccl_group

NUMEL, TIMEOUT_S = 1 << 20, 30.0
ON_CPU = 2
"""Members in small."""


def part(setup: Setup) -> Part:
    """Return part 5."""
    over_gloo = "the same over Gloo, in NCCL's place"
    size = ON_CPU if setup.small else torch.cuda.device_count()
    gpus = "a GPU" if size == 1 or setup.small else f"{size} GPUs"
    over_nccl = f"a group of {gpus} over NCCL: formed, aborted, formed again"
    cases = [Case(over_nccl, partial(_form, setup, over_nccl, "nccl", size), needs_gpu=True)]
    if setup.small:
        cases.append(Case(over_gloo, partial(_form, setup, over_gloo, "gloo", size)))
    return Part(5, "NCCL", 40.0, cases)


def _form(setup: Setup, what: str, backend: str, size: int, left_s: float) -> list[Finding]:
    with in_folder(setup, what) as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.nccl", backend]
        members = [start([*command, str(rank), str(size), str(folder)]) for rank in range(size)]
        await_all(members, what, left_s)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
        figures = {name: max(each[name] for each in found) for name in found[0]}
        words = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {s:.2f} s" for name, s in figures.items())
        return [Finding(what, "passed", words, figures=figures)]


def main(arguments: Sequence[str]) -> None:
    """Be a member: form groups, and write the seconds that it took."""
    backend, rank, size, folder = arguments[0], int(arguments[1]), int(arguments[2]), Path(arguments[3])
    store = HashStore() if size == 1 else FileStore(str(folder / "store"), size)
    home = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if home.type == "cuda":
        torch.cuda.set_device(home)

    def groups(turn: str) -> ProcessGroups:
        def make(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            own = PrefixStore(f"{turn}/{name}", store)
            if backend == "nccl":
                return nccl_group(own, rank, size, TIMEOUT_S, home)
            return gloo_group(own, rank, size, TIMEOUT_S, "127.0.0.1")

        return ProcessGroups(make, TIMEOUT_S)

    seconds: dict[str, float] = {}
    for turn in ("formed", "formed again"):
        began_s = time.monotonic()
        formed = groups(turn)
        group = formed.build("world", range(size))
        _add_up(group, rank, size, home)
        seconds[f"{turn.replace(' ', '_')}_s"] = time.monotonic() - began_s
        began_s = time.monotonic()
        if backend == "nccl" and size > 1 and rank == 0:
            _hang(formed, group, home)
        formed.end()
        seconds.setdefault("aborted_s", time.monotonic() - began_s)
    (folder / f"{rank}.json").write_text(json.dumps(seconds))


def _add_up(group: dist.ProcessGroup, rank: int, size: int, home: torch.device) -> None:
    """Check an all-reduce."""
    x = torch.full((NUMEL,), float(rank + 1), device=home)
    group.allreduce([x]).wait()
    expected = size * (size + 1) / 2
    if not bool((x == expected).all()):
        raise ValueError(f"the sum of {size} members is {x[0].item()}, not {expected}")


def _hang(groups: ProcessGroups, group: dist.ProcessGroup, home: torch.device) -> None:
    """Begin what no other member does; the abort must free this one."""
    work = group.allreduce([torch.ones(NUMEL, device=home)])
    groups.end()
    try:
        work.wait()
    except RuntimeError as error:
        print(f"aborted, as it should be: {error}")
    torch.cuda.synchronize(home)


if __name__ == "__main__":
    main(sys.argv[1:])
