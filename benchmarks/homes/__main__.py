"""Fine-tuning between two homes: ``python -m benchmarks.homes [--json FILE]``. Linux, root.

A small Llama, pretrained here on the standard library's sources, is fine-tuned on the topics of Python's help with trl.
Two hosts of the testbed (benchmarks/testbed) have one worker each. Compared are LoRA alone on one host, LoRA with lsgd
and its default plan, and DistributedDataParallel as accelerate makes it: of LoRA, and of the whole model in full
precision, of which a few steps are enough to count bytes. Bytes are those of the hosts' interfaces, per host.

The libraries come from the environment of benchmarks/programs.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.homes import base
from benchmarks.programs.environment import make
from benchmarks.programs.program import Program
from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed import Host, Testbed, told
from benchmarks.testbed.launch import Process, await_all, free_port, launch_all, start
from lsgd.plan.plan import Plan

Begin = Callable[[Sequence[Host], Path, Sequence[str]], list[Process]]
"""Starts the processes of a training on hosts, with a folder and the arguments of the script."""

SCRIPT = Program(Path(__file__).with_name("finetune.py"))
FEW = 4
"""Steps of the whole model with DDP."""

DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Result:
    """One training.

    Args:
        method: of the table.
        steps: of each host.
        seconds: from the start of the processes to their end.
        trained: parameters that train.
        sent_nbytes: of the host that sends more: with DDP, the one that sends the whole model at the start.
        others_nbytes: of the host that sends less.
        loss: on texts that are held out.
    """

    method: str
    steps: int
    seconds: float
    trained: int
    sent_nbytes: int
    others_nbytes: int
    loss: float


class Homes:
    """Trains with each method.

    Args:
        python: of the environment that has the libraries.
        folder: for all that is written.
        link: rate in Mbit/s, and delay in milliseconds.
        steps: of all hosts together.
    """

    def __init__(self, python: str, folder: Path, link: tuple[float, float], steps: int) -> None:
        self._python, self._folder, self._link, self._steps = python, folder, link, steps
        (folder / "plain.py").write_text(SCRIPT.plain, encoding="utf-8")

    def pretrain(self, steps: int) -> None:
        """Make the model that the others begin with."""
        command = [self._python, str(Path(base.__file__).resolve()), str(self._folder / "base"), str(steps)]
        await_all([start(command)], "the pretraining", DEADLINE_S)

    def alone(self) -> Result:
        """Fine-tune on one host."""
        return self._measured("LoRA, one home", 1, self._steps, "lora", self._plain)

    def shared(self) -> Result:
        """Fine-tune with lsgd."""
        return self._measured("LoRA, two homes, lsgd", 2, self._steps // 2, "lora", self._launched)

    def ddp(self, kind: str, name: str, steps: int) -> Result:
        """Fine-tune with DistributedDataParallel."""
        return self._measured(name, 2, steps, kind, self._torchrun)

    def _measured(self, method: str, hosts: int, steps: int, kind: str, begin: Begin) -> Result:
        rate, delay = self._link
        with Testbed(hosts, rate_mbit=rate, delay_ms=delay) as testbed:
            output = self._folder / re.sub(r"\W+", "-", method)
            output.mkdir()
            began = time.monotonic()
            arguments = [str(self._folder / "base"), str(output), str(steps), kind]
            said = "\n".join(await_all(begin(testbed.hosts, output, arguments), method, DEADLINE_S))
            sent = sorted(host.sent_nbytes for host in testbed.hosts)
        seconds = time.monotonic() - began
        found = {name: float(x) for name, x in re.findall(r"(trained parameters|held-out loss): ([\d.]+)", said)}
        trained, loss = int(found["trained parameters"]), round(found["held-out loss"], 3)
        return Result(method, steps, round(seconds, 1), trained, sent[-1], sent[0], loss)

    def _plain(self, hosts: Sequence[Host], output: Path, arguments: Sequence[str]) -> list[Process]:
        return [start([self._python, str(self._folder / "plain.py"), *arguments], host) for host in hosts]

    def _torchrun(self, hosts: Sequence[Host], output: Path, arguments: Sequence[str]) -> list[Process]:
        port = free_port()
        common = ["-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--nproc-per-node", "1"]
        common += ["--master-addr", hosts[0].address, "--master-port", str(port)]
        script = [str(self._folder / "plain.py"), *arguments]
        return [start([self._python, *common, "--node-rank", str(host.index), *script], host) for host in hosts]

    def _launched(self, hosts: Sequence[Host], output: Path, arguments: Sequence[str]) -> list[Process]:
        return launch_all(hosts, Plan(), output, lambda host: [self._python, str(SCRIPT.path), *arguments])


def row(result: Result, rate_mbit: float) -> list[str]:
    """Return a line of the table."""
    per_step = result.others_nbytes / result.steps
    return [
        result.method,
        f"{result.trained:,}",
        str(result.steps),
        f"{result.sent_nbytes / 1e6:.1f}",
        f"{per_step / 1e6:.3f}",
        f"{8 * per_step / rate_mbit / 1e6:.2f}",
        f"{result.loss:.3f}" if result.steps > FEW else "",
        f"{result.seconds:.0f}",
    ]


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.homes", __doc__)
    parser.add_argument("--rate-mbit", type=float, default=10.0, help="that each home can send")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way")
    parser.add_argument("--steps", type=int, default=80, help="of all homes together")
    parser.add_argument("--pretraining", type=int, default=150, help="steps of it")
    parser.add_argument("--python", help="the interpreter of an environment that is there, instead of .programs/")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    return parser.parse_args()


def main() -> int:
    """Train with each method, and print a Markdown table."""
    options = options_of()
    machine = about("benchmarks.homes")
    print(heading(machine) + "\n", flush=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(prefix="lsgd-homes-") as name:
        link = (options.rate_mbit, options.delay_ms)
        homes = Homes(options.python or make(), Path(name), link, options.steps)
        homes.pretrain(options.pretraining)
        results = []
        for make_result in (
            homes.alone,
            homes.shared,
            lambda: homes.ddp("lora", "LoRA, two homes, DDP", options.steps // 2),
            lambda: homes.ddp("whole", "the whole model, two homes, DDP", FEW),
        ):
            results.append(make_result())
            print(results[-1], flush=True)
    columns = ["training", "parameters that train", "steps of each", "MB sent", "MB a step", "s a step on the link"]
    columns += ["held-out loss", "s here"]
    print("\n" + table(columns, [row(result, options.rate_mbit) for result in results]))
    write_json(options.json, machine, results, rate_mbit=options.rate_mbit, delay_ms=options.delay_ms)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
