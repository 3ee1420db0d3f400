"""The states of a round as a figure, from the client's own table.

``python -m scripts.docs.figure`` writes docs/pictures/round.svg.
"""

import textwrap
from html import escape
from pathlib import Path

from lsgd.client.iteration.round import TRANSITIONS, State

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "round.svg"
LEFT, WIDTH, HEIGHT = 84, 390, 66
"""Left edge and size of a box."""
STEP = 98
"""From one box to the next."""
LANE = 16
"""From one arrow beside the boxes to the next."""
STYLE = """
  svg { font: 14px system-ui, sans-serif;
        --paper: #fff; --ink: #1f2328; --go: #0969da; --drop: #bc4c00; --box: #f6f8fa; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #16181d; --ink: #e6e8eb; --go: #6cb2ff; --drop: #f0a35e; --box: #23262e; }
  }
  rect, path { fill: none; stroke-width: 1.5; }
  .paper { fill: var(--paper); } .box { fill: var(--box); }
  .go { stroke: var(--go); } .drop { stroke: var(--drop); } path.drop { stroke-dasharray: 5 3; }
  marker .go { fill: var(--go); stroke: none; } marker .drop { fill: var(--drop); stroke: none; }
  text { fill: var(--ink); } .name { font-weight: 600; }
"""


def figure() -> str:
    """Return the figure: states in a column, ways that skip some on the left, those to the last on the right."""
    states = list(State)
    ways = [(states.index(a), states.index(b)) for a, after in TRANSITIONS.items() for b in after]
    last = len(states) - 1
    left = [(a, b) for a, b in ways if b != last and b != a + 1]
    right = [(a, b) for a, b in ways if b == last]
    drawn = [_box(state, row, "drop" if row == last else "go") for row, state in enumerate(states)]
    drawn += [_down(a) for a, b in ways if b != last and b == a + 1]
    drawn += _beside(left, LEFT, -1, "go") + _beside(right, LEFT + WIDTH, 1, "drop")
    width, height = 2 * LEFT + WIDTH, 40 + STEP * last + HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"<title>The states of a round</title>\n<style>{STYLE}</style>\n"
        f"<defs>{_head('go')}{_head('drop')}</defs>\n"
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _head(kind: str) -> str:
    return (
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="{kind}" d="M0 0L8 4L0 8z"/></marker>'
    )


def _middle(row: int) -> int:
    return 20 + row * STEP + HEIGHT // 2


def _box(state: State, row: int, kind: str) -> str:
    lines = textwrap.wrap(state.value, 50)
    y = _middle(row) + 5 - 9 * len(lines)
    texts = [f'<text class="name" x="{LEFT + 14}" y="{y}">{state.name}</text>']
    texts += [f'<text x="{LEFT + 14}" y="{y + 18 * n}">{escape(line)}</text>' for n, line in enumerate(lines, 1)]
    size = f'x="{LEFT}" y="{_middle(row) - HEIGHT // 2}" width="{WIDTH}" height="{HEIGHT}" rx="6"'
    return f'<rect class="box {kind}" {size}/>' + "".join(texts)


def _down(row: int) -> str:
    begin = f"M{LEFT + WIDTH // 2} {_middle(row) + HEIGHT // 2}"
    return f'<path class="go" marker-end="url(#go)" d="{begin}v{STEP - HEIGHT - 1}"/>'


def _beside(ways: list[tuple[int, int]], edge: int, side: int, kind: str) -> list[str]:
    """Return arrows from box to box along one edge, each in a lane of its own; the longest is the outermost."""
    paths = []
    for lane, (a, b) in enumerate(sorted(ways, key=lambda way: way[1] - way[0])):
        apart = 5 * (2 * lane - len(ways) + 1)
        x = edge + side * (20 + LANE * lane)
        way = f"M{edge} {_middle(a) - apart}H{x}V{_middle(b) + apart}H{edge + side}"
        paths.append(f'<path class="{kind}" stroke-linejoin="round" marker-end="url(#{kind})" d="{way}"/>')
    return paths


if __name__ == "__main__":
    PICTURE.write_text(figure(), encoding="utf-8")
