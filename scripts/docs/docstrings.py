"""Docstrings as Markdown: an extension of griffe, which reads them for the page of the Python API."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?:meth|class|func|attr|mod|data|exc|const):`~?([^`]+)`")
EXAMPLE = re.compile(r"::\n\n((?:(?: {4}.*)?\n?)+)")


class Markdown(griffe.Extension):
    """Writes roles as code and indented examples as fenced code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Take an object that griffe has read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring without roles, and with its examples in fences."""
    return EXAMPLE.sub(_fence, ROLE.sub(r"`\1`", text).replace("``", "`"))


def _fence(found: re.Match[str]) -> str:
    lines = [line[4:] for line in found[1].rstrip().split("\n")]
    return ":\n\n```python\n" + "\n".join(lines) + "\n```\n\n"
