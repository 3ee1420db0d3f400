"""Results that are written as they come, so that a benchmark which was interrupted goes on where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
