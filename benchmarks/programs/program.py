"""A program: one file, whose docstring says what it needs, and whose marks say which lines lsgd has added.

``LINE  # lsgd`` is a line that lsgd has added; if it begins a block, what is in the block is not. ``LINE  # lsgd: WAS``
stands in place of the line ``WAS``. Without the marked lines it is the program that a user of the library has.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
_MARK = re.compile(r"^(?P<line>.*?)\s*# lsgd(?:: (?P<was>.*))?$")
_HEAD = re.compile(r'^"""(?P<title>.*?)\.?\n(?P<rest>.*?)"""', re.S)
_FIELD = re.compile(r"^(?P<name>[A-Z][a-z]+): (?P<value>.+)$", re.M)


@dataclass(frozen=True)
class Program:
    """A program.

    The fields of its docstring, a line each: ``Needs`` (packages), ``Steps`` (of one process; two workers make half of
    them each), ``Figure`` (what it prints at the end, as ``FIGURE: NUMBER``), ``Alone`` (what Python starts
    it with), ``Launch`` (options of lsgd launch;
    ``none``: it starts the workers itself), ``Variables`` (of the run), ``Remark`` and ``Unable`` (why it is not run).

    Args:
        path: of the file.
    """

    path: Path

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.path.stem

    @cached_property
    def text(self) -> str:
        """The file's text."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _head(self) -> tuple[str, dict[str, str]]:
        found = _HEAD.match(self.text)
        if found is None:
            raise ValueError(f"{self.path} does not begin with a docstring that has a title and fields")
        return found["title"], dict(_FIELD.findall(found["rest"]))

    @property
    def title(self) -> str:
        """What it is."""
        return self._head[0]

    def says(self, field: str, default: str = "") -> str:
        """Return a field of the docstring."""
        return self._head[1].get(field, default)

    @property
    def needs(self) -> list[str]:
        """The packages whose versions count, besides torch."""
        return self.says("Needs").split()

    @property
    def steps(self) -> int:
        """Optimizer steps that it makes alone."""
        return int(self.says("Steps", "80"))

    @property
    def digest(self) -> str:
        """By which results know the file; a change of the docstring alone changes none."""
        return hashlib.blake2b(_HEAD.sub("", self.text, count=1).encode(), digest_size=6).hexdigest()

    @property
    def plain(self) -> str:
        """The program without lsgd."""
        return "\n".join(_plain(self.text.splitlines())) + "\n"

    @property
    def changes(self) -> tuple[int, int]:
        """How many lines lsgd has added, and how many of the program's it has replaced."""
        marks = [found for line in self.text.splitlines() if (found := _MARK.match(line))]
        replaced = sum(found["was"] is not None for found in marks)
        return len(marks) - replaced, replaced


def _plain(lines: list[str]) -> Iterator[str]:
    blocks: list[int] = []  # indentation of each marked line that has begun a block
    for line in lines:
        depth = len(line) - len(line.lstrip())
        while blocks and line.strip() and depth <= blocks[-1]:
            blocks.pop()
        found = _MARK.match(line)
        indent = " " * (depth - 4 * len(blocks))
        if found is None:
            yield indent + line.lstrip()
        elif found["was"] is not None:
            yield indent + found["was"]
        elif found["line"].endswith(":"):
            blocks.append(depth)


def programs() -> list[Program]:
    """Return all programs by name."""
    return [Program(path) for path in sorted(SCRIPTS.glob("*.py"))]
