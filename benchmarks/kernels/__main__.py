"""The codecs' kernels: ``python -m benchmarks.kernels [--device cpu|cuda] [--json FILE] [--quick]``.

Every call is timed right after a copy of the same buffer (``copy_`` on a CPU, a 16-byte copy kernel on CUDA), so that
what else the machine does hits both; the ratio to the copy is the median over these pairs. GB/s are of float32
elements, the median too. Bytes per element are those that an operation must move at least: a wasteful kernel, too, can
show many GB/s. Buffers are rotated, so that no call finds its input in a cache.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import numpy
import torch

from benchmarks.kernels.cases import Case, CpuDevice, CudaDevice, Device
from benchmarks.report.about import about, argument_parser, heading, write_json

SIZES = (1 << 20, 1 << 24, 1 << 26, 1 << 28, 1 << 30)  # bytes of float32
QUICK_SIZES = (1 << 20, 1 << 26)
ROTATED_NBYTES = 256 << 20  # that much of buffers takes turns, two at least
CASE_SECONDS = 6.0  # a case that has taken so long is not repeated further


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    operation: str
    nbytes: int
    seconds: float
    gigabytes_per_s: float
    bytes_per_element: float
    ratio_to_copy: float


def measure(copy: Case, case: Case, device: Device, *, repeats: int) -> tuple[float, float]:
    """Return the median seconds of a case, and the median ratio of the copy's time to it."""
    for call in (copy.calls[0], *case.calls):
        call()
    seconds, ratios = [], []
    for turn in range(repeats):
        before = device.time(copy.calls[turn % len(copy.calls)])
        seconds.append(device.time(case.calls[(turn + 1) % len(case.calls)]))  # not the buffer just copied
        ratios.append(before / seconds[-1])
        if turn >= 2 and sum(seconds) > CASE_SECONDS:
            break
    return statistics.median(seconds), statistics.median(ratios)


def run(device: Device, sizes: Sequence[int], *, repeats: int, slow: bool) -> Iterator[Result]:
    """Yield a result for every case at every size; ``slow``: also those that take seconds to compile."""
    for nbytes in sizes:
        numel = nbytes // 4
        rotated = max(2, min(256, ROTATED_NBYTES // nbytes))
        group = device.cases(numel, rotated, slow=slow)
        for case in group:
            seconds, ratio = measure(group[0], case, device, repeats=repeats)
            yield Result(case.name, nbytes, seconds, nbytes / seconds / 1e9, case.bytes_per_element, ratio)


def main() -> None:
    """Print the table; write it as JSON if asked to."""
    parser = argument_parser("benchmarks.kernels", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="two sizes, few repeats, no torch.compile")
    parser.add_argument("--repeats", type=int, help="calls per case of which the median counts")
    parser.add_argument("--threads", type=int, help="torch's number of threads")
    parser.add_argument("--sizes", type=int, nargs="+", help="buffer sizes in MiB of float32")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    device: Device = CudaDevice() if options.device == "cuda" else CpuDevice()
    sizes = [mib << 20 for mib in options.sizes or ()] or (QUICK_SIZES if options.quick else SIZES)
    versions = {
        "threads": str(torch.get_num_threads()),
        "llvmlite": llvmlite.__version__,
        "numpy": numpy.__version__,
    }
    machine = {**about("benchmarks.kernels"), "device": device.name(), **versions}
    print(heading(machine), flush=True)
    results: list[Result] = []
    repeats = options.repeats or (5 if options.quick else 15)
    for result in run(device, sizes, repeats=repeats, slow=not options.quick):
        if not results or results[-1].nbytes != result.nbytes:
            print(f"\n{result.nbytes / 2**20:.0f} MiB of float32")
            print(f"{'operation':<42} {'GB/s':>8} {'bytes/element':>14} {'ratio to copy':>14}")
        results.append(result)
        speed, size = f"{result.gigabytes_per_s:8.2f}", f"{result.bytes_per_element:14.2f}"
        print(f"{result.operation:<42} {speed} {size} {result.ratio_to_copy:14.2f}", flush=True)
    write_json(options.json, machine, results)


if __name__ == "__main__":
    main()
