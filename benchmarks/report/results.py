"""Results that are written as they come, so that a benchmark which was interrupted goes on where it was."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.baselines import environments
from benchmarks.testbed.launch import RunFailedError


def add_options(parser: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    """Give a benchmark the options that say which methods to run, with which Python, and where to keep results."""
    parser.add_argument("--methods", nargs="+", choices=methods, help="which ones")
    environments.add_option(parser)
    parser.add_argument("--json", type=Path, help="write the results to this file as they come, and go on with those")


class Results:
    """The results of a benchmark, in a file if one is given.

    Args:
        path: of the JSON file; results that it has already are kept. None: nowhere.
        machine: what ran them.
        settings: what all of them have in common.

    Raises:
        ValueError: the file's results were made with other settings.
    """

    def __init__(self, path: Path | None, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._path = path
        self._head = {**machine, "settings": dict(settings)}
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != json.loads(json.dumps(self._head["settings"])):
                raise ValueError(
                    f"{path} has results with other settings, {found['settings']}; name another file with --json"
                )
            self.rows = found["results"]

    def has(self, **key: Any) -> bool:
        """Return whether there is a result with these values."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def keep(self, make: Callable[[], Any], what: str, **key: Any) -> None:
        """Keep the result that ``make`` returns, unless there is one with this key; or note that it failed.

        Args:
            make: raises RunFailedError when it fails; the result is a dataclass, whose text is shown.
            what: is made.
            key: values by which the result is known.
        """
        if self.has(**key):
            return
        try:
            result = make()
        except RunFailedError as error:
            print(error, file=sys.stderr, flush=True)
            self.failed.append(what)
            return
        self.add({**key, **asdict(result)})
        print(f"{what}: {result}", flush=True)

    def end(self, methods: Sequence[str], installed: Container[str]) -> int:
        """Say which methods are not installed and what failed, and return the benchmark's exit code."""
        if missing := [method for method in methods if method not in installed]:
            print(f"\nnot installed: {', '.join(missing)}")
        if self.failed:
            print(f"\nfailed: {'; '.join(self.failed)}", file=sys.stderr)
        return 1 if self.failed else 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a result."""
        self.rows.append(dict(row))
        if self._path is not None:
            unfinished = self._path.with_name(self._path.name + ".unfinished")
            unfinished.write_text(self._text())
            os.replace(unfinished, self._path)

    def _text(self) -> str:
        """Return all as JSON, with a line for each result."""
        head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self._head.items()]
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        return "{\n" + ",\n".join([*head, f'"results": [\n{rows}\n]']) + "\n}\n"
