"""Runs a command on every host of a new testbed: ``python -m benchmarks.testbed``."""

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from benchmarks.testbed import Testbed, TestbedError


def _print_lines(name: str, stream: IO[str]) -> None:
    for line in stream:
        print(f"[{name}] {line}", end="", flush=True)


def _run_on_all(testbed: Testbed, command: Sequence[str]) -> int:
    """Run ``command`` on every host, show its lines under the host's name, and return the first exit code not 0.

    A command that a signal ended counts as 128 and its number, as in a shell.
    """
    processes, printers = [], []
    for host in testbed.hosts:
        env = {**os.environ, "TESTBED_HOST": str(host.index), "TESTBED_ADDRESS": host.address}
        process = host.popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printer = threading.Thread(target=_print_lines, args=(host.name, process.stdout))
        printer.start()
        processes.append(process)
        printers.append(printer)
    codes = [process.wait() for process in processes]
    for printer in printers:
        printer.join()
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def main() -> int:
    """Run a command on every host of a new testbed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed", description=main.__doc__)
    parser.add_argument("hosts", type=int, help="how many, 1 to 250")
    parser.add_argument("--rate-mbit", type=float, help="what each can send (default: unlimited)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="how long each packet is under way")
    parser.add_argument("command", nargs="+", help="after --; $TESTBED_HOST and $TESTBED_ADDRESS tell it where it is")
    options = parser.parse_args()
    try:
        with Testbed(options.hosts, rate_mbit=options.rate_mbit, delay_ms=options.delay_ms) as testbed:
            return _run_on_all(testbed, options.command)
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
