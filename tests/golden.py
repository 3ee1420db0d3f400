"""What lsgd says, each sentence once: a test asks for it by its code, so another wording changes one file.

``sentences/said.toml`` has what errors, logs and commands say. ``sentences/reasons.txt`` has the reasons of the global
server: ``python -m tests.golden`` writes it anew, and counts the asserts that still compare sentences.
"""

import ast
import re
import string
import tomllib
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from lsgd.server.reasons import Why

TESTS = Path(__file__).parent
REASONS = TESTS / "sentences" / "reasons.txt"
SAID = tomllib.loads((TESTS / "sentences" / "said.toml").read_text(encoding="utf-8"))
WORDS = 4
"""So many words make a sentence."""

EXAMPLES = {
    "address": "10.0.0.1",
    "algorithm": "diloco",
    "are": "are",
    "before": 0,
    "call": "mean()",
    "check": "check the cable",
    "count": 120,
    "delay": " with a delay of 2",
    "differ": "length 80 and 100",
    "done": 40,
    "error": "KeyError: 'x'",
    "failures": 10,
    "farewell": "its training loop ended",
    "first": "node0/worker0",
    "for_s": 4.2,
    "heard_s": 1.25,
    "here": 1,
    "holders": "node0/worker0, node0/worker1",
    "id": 7,
    "index": 1,
    "joined": "2 workers are in the run",
    "limit": 600.0,
    "longest_s": 90.0,
    "lost": 2,
    "missing": "; missing: node1/worker0",
    "model": "the run's model",
    "more": " (and 2 more pairs)",
    "name": "alpha",
    "node": 1,
    "nodes": "2 nodes",
    "notice": "the local server of node1 got SIGTERM",
    "number": 2,
    "open_round": " (round 2 is not completed yet)",
    "order": "lsgd stop",
    "other": "node0/worker0",
    "ours": "20",
    "pairs": "node0 and node1",
    "patience_s": 120.0,
    "period": 16,
    "quiet_s": 6.2,
    "reason": "nothing was heard from it for 6 s",
    "remedy": "pass the same seed on all workers",
    "resumed": 100,
    "round_s": 1.234,
    "run": "5d3f",
    "same": "their first rows",
    "scope": "global",
    "seconds": 60.0,
    "step_s": 0.05,
    "takers": "; taking over their model: node1/worker0",
    "term": 3,
    "text": "0.5",
    "theirs": "30",
    "them": "them",
    "transfer": ": 7.1 of 50.0 MB",
    "transport": "tcp",
    "versions": "torch 2.12 and 2.13",
    "wait_s": 4.0,
    "waited_s": 3.25,
    "waits_s": 30.0,
    "wanted": 2,
    "when": "in 10 s",
    "where": " here",
    "who": "node0/worker0, node1/worker0",
    "why": ", without node2",
    "worker": "node1/worker0",
    "workers": "3 workers",
}


def text(code: str, **values: object) -> str:
    """Return the sentence that has this code, ``area.name``, with these values in its places."""
    area, name = code.split(".")
    said: str = SAID[area][name]
    for place, value in values.items():
        assert f"{{{place}}}" in said, f"{code} has no place {place}"
        said = said.replace(f"{{{place}}}", str(value))
    return said


def pattern(code: str, **values: object) -> str:
    """Return the regular expression of :func:`text`, for what is said: all is literal but what stands in <...>."""
    parts = re.split("<([^>]*)>", text(code, **{place: f"\0{place}\0" for place in values}))
    said = "".join(part if hole else escape(part) for part, hole in zip(parts, cycle((False, True)), strict=False))
    for place, value in values.items():
        said = said.replace(f"\0{place}\0", escape(str(value)))
    return said


def escape(said: str) -> str:
    """Return a regular expression of only this text; ``re.escape`` escapes blanks, too, which is hard to read."""
    return re.sub(r"[][.^$*+?{}()\\|]", r"\\\g<0>", said)


def reasons() -> str:
    """Return every reason's code and sentence, with values as examples."""
    lines = []
    for why in Why:
        places = {place for _, place, _, _ in string.Formatter().parse(why.value) if place}
        lines.append(f"{why.code}: {why(**{place: EXAMPLES[place] for place in places})}\n")
    return "".join(lines)


def is_sentence(node: ast.AST) -> bool:
    """Return whether a text, or the fixed parts of one, has as many words as a sentence."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    fixed = "".join(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return sum(bool(re.search("[A-Za-z]{2}|^[aI]$", word)) for word in fixed.split()) >= WORDS


def has_sentence(node: ast.AST) -> bool:
    """Return whether something compares a sentence; the values of a reason or of a code are none."""
    if isinstance(node, ast.Constant | ast.JoinedStr):
        return is_sentence(node)
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("Why.", "golden.")):
        return False
    return any(map(has_sentence, ast.iter_child_nodes(node)))


def comparisons(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield the line of each assert and each ``raises`` or ``warns`` of a file, and whether it compares a sentence."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assert):
            yield node.lineno, has_sentence(node.test)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("raises", "warns")):
            yield node.lineno, any(has_sentence(keyword) for keyword in node.keywords if keyword.arg == "match")


def count() -> tuple[int, int]:
    """Return how many asserts of the tests compare a sentence, and of how many."""
    found = [compares for path in TESTS.rglob("*.py") for _, compares in comparisons(path)]
    return sum(found), len(found)


if __name__ == "__main__":
    REASONS.write_text(reasons(), encoding="utf-8")
    compare, of = count()
    print(f"{compare} of {of} asserts compare a sentence")
