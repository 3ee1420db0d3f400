"""What a worker's memory holds beside the model: ``python -m benchmarks.memory [--quick] [--json FILE]``. Linux.

Two nodes of one worker each run on this machine, with ``lsgd launch``, the real servers and lsgd's own connections, by
a plan of one phase for each algorithm; once without ``offload``, and once with. A worker notes the resident memory of
its process before each iteration, and the most since the last one, as the kernel counts it. What it had with the model
and its gradients before the join is subtracted, and so is what the same takes with a tiny model: programs, threads and
buffers of the network. The rest is divided by the parameters.

On a GPU, what is resident without ``offload`` is on the GPU, and the transport stages it in the CPU's memory; with it,
all is in the CPU's memory.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.memory import worker
from benchmarks.memory.measure import WORKERS, measure, memory_table
from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.testbed.launch import await_all, free_port, launch_command, start
from lsgd.plan.plan import Plan

NUMEL, QUICK_NUMEL = 50_000_000, 8_000_000
DEADLINE_S = 1800.0


def train(plan: Plan, numel: int, notes: Path) -> None:
    """Train a model of so many parameters in two workers."""
    path, port = notes.with_suffix(".toml"), free_port()
    path.write_text(plan.to_toml())
    script = [sys.executable, str(worker.__file__), str(numel), str(notes)]
    processes = []
    for node in range(WORKERS):
        folder = notes.with_suffix(f".node{node}")
        command = launch_command(node, WORKERS, "127.0.0.1", 1, path, folder, port=port)
        processes.append(start([*command, "--insecure", "--", *script]))
    await_all(processes, f"a model of {numel:,} parameters", DEADLINE_S)


def main() -> int:
    """Measure all algorithms, and print a Markdown table of bytes per parameter."""
    parser = argument_parser("benchmarks.memory", __doc__)
    parser.add_argument("--parameters", type=int, default=NUMEL, help="of the model")
    parser.add_argument("--quick", action="store_true", help=f"a model of {QUICK_NUMEL:,}")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    numel = QUICK_NUMEL if options.quick else options.parameters
    machine = about("benchmarks.memory")
    print(heading(machine) + "\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as name:
        without, offloaded = (measure(numel, train, Path(name), offload=offload) for offload in (False, True))
    rows = [
        {"case": case, "offload": offload, "kept": one.kept, "peak": one.peak}
        for offload, measured in ((False, without), (True, offloaded))
        for case, one in measured.items()
    ]
    print(memory_table(rows))
    write_json(options.json, machine, rows, parameters=numel, workers=WORKERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
