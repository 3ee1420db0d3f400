"""Figures of states and the ways between them, from the code's own tables where it has them.

``python -m scripts.docs.figure`` writes docs/pictures/{round,member,connection}.svg.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lsgd.client.iteration import round as rounds
from lsgd.server import roster

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
LEFT, WIDTH, HEIGHT = 84, 390, 66
"""Left edge and size of a box."""
STEP = 98
"""From one box to the next."""
LANE = 16
"""From one lane of arrows beside the boxes to the next: each state that they lead to has a lane."""
STYLE = """
  svg { font: 14px system-ui, sans-serif;
        --paper: #fff; --ink: #1f2328; --go: #0969da; --drop: #bc4c00; --box: #f6f8fa; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #16181d; --ink: #e6e8eb; --go: #6cb2ff; --drop: #f0a35e; --box: #23262e; }
  }
  rect, path { fill: none; stroke-width: 1.5; }
  .paper { fill: var(--paper); } .box { fill: var(--box); }
  .go { stroke: var(--go); } .drop { stroke: var(--drop); }
  marker .go { fill: var(--go); stroke: none; } marker .drop { fill: var(--drop); stroke: none; }
  text { fill: var(--ink); } .name { font-weight: 600; }
"""


@dataclass(frozen=True)
class Figure:
    """States in a column, and the ways between them: good ones down or on the left, the others on the right.

    Attributes:
        title: what the states are of.
        states: their names, and what each means.
        ways: pairs of names.
        bad: the states that nobody wants to be in.
    """

    title: str
    states: dict[str, str]
    ways: list[tuple[str, str]]
    bad: frozenset[str]

    def svg(self) -> str:
        """Return the figure."""
        rows = list(self.states)
        ways = sorted({(rows.index(a), rows.index(b)) for a, b in self.ways})
        bad = {rows.index(name) for name in self.bad}
        drawn = [_box(name, words, row, _kind(row, bad)) for row, (name, words) in enumerate(self.states.items())]
        drawn += [_down(a) for a, b in ways if b == a + 1 and b not in bad]
        drawn += _beside([way for way in ways if way[1] not in bad and way[1] != way[0] + 1], LEFT, -1, "go")
        drawn += _beside([way for way in ways if way[1] in bad], LEFT + WIDTH, 1, "drop")
        width, height = 2 * LEFT + WIDTH, 40 + STEP * (len(rows) - 1) + HEIGHT
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">\n'
            f"<title>{self.title}</title>\n<style>{STYLE}</style>\n"
            f"<defs>{_head('go')}{_head('drop')}</defs>\n"
            f'<rect class="paper" width="{width}" height="{height}" rx="8"/>\n' + "\n".join(drawn) + "\n</svg>\n"
        )


ROUND = Figure(
    "The states of a round",
    {state.name: state.value for state in rounds.State},
    [(state.name, after.name) for state, following in rounds.TRANSITIONS.items() for after in following],
    frozenset({"DROPPED"}),
)
MEMBER = Figure(
    "The states of a worker, as the global server sees it",
    {state.name: state.means for state in roster.MemberState},
    [(before.name, after.name) for before, after, _ in roster.TRANSITIONS],
    frozenset(state.name for state in roster.MemberState if not state.live and state.name != "JOINED"),
)
CONNECTION = Figure(
    "The states of a connection between two workers",
    {
        "DIALLED": "the source dials the target; or the target dials; or both dial the relay",
        "GREETED": "TLS, then a hello: who it is, and how many bytes have arrived",
        "OPEN": "messages, in the same order at both ends",
        "BROKEN": "reset, or nothing acknowledged for 5 s; tensors are kept, and it is dialled again",
        "CLOSED": "the generation is over, or its round has failed",
    },
    [
        *(
            ("DIALLED", "GREETED"),
            ("GREETED", "OPEN"),
            ("OPEN", "BROKEN"),
            ("GREETED", "BROKEN"),
            ("BROKEN", "DIALLED"),
        ),
        *((state, "CLOSED") for state in ("DIALLED", "GREETED", "OPEN", "BROKEN")),
    ],
    frozenset({"BROKEN", "CLOSED"}),
)
FIGURES = {"round": ROUND, "member": MEMBER, "connection": CONNECTION}
"""By the names of their files."""


def _kind(row: int, bad: set[int]) -> str:
    return "drop" if row in bad else "go"


def _head(kind: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="{kind}" d="M0 0L8 4L0 8z"/></marker>'
    )


def _middle(row: int) -> int:
    return 20 + row * STEP + HEIGHT // 2


def _box(name: str, words: str, row: int, kind: str) -> str:
    lines = textwrap.wrap(words, 50)
    y = _middle(row) + 5 - 9 * len(lines)
    texts = [f'<text class="name" x="{LEFT + 14}" y="{y}">{name}</text>']
    texts += [f'<text x="{LEFT + 14}" y="{y + 18 * n}">{escape(line)}</text>' for n, line in enumerate(lines, 1)]
    size = f'x="{LEFT}" y="{_middle(row) - HEIGHT // 2}" width="{WIDTH}" height="{HEIGHT}" rx="6"'
    return f'<rect class="box {kind}" {size}/>' + "".join(texts)


def _down(row: int) -> str:
    begin = f"M{LEFT + WIDTH // 2} {_middle(row) + HEIGHT // 2}"
    return f'<path class="go" marker-end="url(#go)" d="{begin}v{STEP - HEIGHT - 1}"/>'


def _beside(ways: list[tuple[int, int]], edge: int, side: int, kind: str) -> Iterator[str]:
    """Yield arrows along one edge; those to the same box share a lane, and end in one point above its middle."""
    for lane, to in enumerate(sorted({to for _, to in ways})):
        x = edge + side * (20 + LANE * lane)
        for row in (a for a, b in ways if b == to):
            way = f"M{edge} {_middle(row) + 6 * (lane + 1)}H{x}V{_middle(to) - 12}H{edge + side}"
            yield f'<path class="{kind}" stroke-linejoin="round" marker-end="url(#{kind})" d="{way}"/>'


if __name__ == "__main__":
    for name, figure in FIGURES.items():
        (PICTURES / f"{name}.svg").write_text(figure.svg(), encoding="utf-8")
