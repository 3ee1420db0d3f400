"""What ``lsgd up`` does, by what it finds."""

from pathlib import Path

import pytest

from lsgd.pairing.discovery import Advert, Kind
from lsgd.pairing.rules import LOOK_S, Begin, Choose, Dial, Facts, Look, Resume, next_step

OWN = Advert("mmmm", "me", Kind.LOOKS, 0)
LOWER, HIGHER = (Advert(identity, identity, Kind.LOOKS, 0) for identity in ("aaaa", "zzzz"))
WAITS, OTHER = (Advert(identity, identity, Kind.WAITS, 27402) for identity in ("xxxx", "yyyy"))
LOW_WAITS = Advert("aaaa", "aaaa", Kind.WAITS, 27402)
RUNS = Advert("xxxx", "xxxx", Kind.RUNS, 27402)
MEMBER = Advert("xxxx", "xxxx", Kind.MEMBER, 0)
DIED = Path("runs/mine")


@pytest.mark.parametrize(
    ("step", "facts"),
    [
        (Look(), {"looked_s": 0.0}),
        (Look(), {"looked_s": LOOK_S - 0.1, "seen": (HIGHER, MEMBER)}),
        (Begin(), {"seen": (HIGHER,)}),
        (Look(), {"seen": (LOWER,)}),
        (Begin(), {"seen": (LOWER,), "looked_s": 2 * LOOK_S}),  # it does not begin after all
        (Begin(), {}),
        (Begin(), {"seen": (MEMBER,)}),
        (Dial(advert=WAITS), {"looked_s": 0.1, "seen": (OWN, WAITS)}),
        (Dial(advert=RUNS), {"looked_s": 0.1, "seen": (RUNS,)}),
        (Choose((WAITS, OTHER)), {"seen": (OTHER, WAITS)}),
        (Dial(advert=OTHER), {"seen": (OTHER, WAITS), "known": {"yyyy"}}),
        (Choose((WAITS, OTHER)), {"seen": (OTHER, WAITS), "known": {"xxxx", "yyyy"}}),
        (Begin(), {"seen": (WAITS,), "unreachable": {"xxxx"}}),
        (Begin(), {"seen": (WAITS,), "new": True}),
        (Dial(at="192.0.2.1"), {"looked_s": 0.0, "seen": (WAITS,), "at": "192.0.2.1"}),
        (Resume(DIED), {"looked_s": 0.0, "seen": (RUNS,), "died": DIED}),
        (Begin(), {"waits": True, "seen": (WAITS,)}),
        (Dial(advert=LOW_WAITS), {"waits": True, "seen": (LOW_WAITS,)}),
        (Begin(), {"waits": True, "seen": (LOW_WAITS,), "guests": 1}),
        (Begin(), {"waits": True, "seen": (RUNS,)}),  # a stranger's
        (Dial(advert=RUNS), {"waits": True, "seen": (RUNS,), "known": {"xxxx"}}),
    ],
)
def test_each_situation_has_one_step(step: object, facts: dict) -> None:
    assert next_step(Facts(**{"identity": "mmmm", "looked_s": LOOK_S, **facts})) == step


def test_of_two_that_look_or_wait_exactly_one_begins() -> None:
    for kind, waits in ((Kind.LOOKS, False), (Kind.WAITS, True)):
        both = [Advert(identity, identity, kind, 27402) for identity in ("aaaa", "zzzz")]
        steps = [next_step(Facts(one.identity, LOOK_S, seen=tuple(both), waits=waits)) for one in both]
        assert [type(step) is Begin for step in steps] == [True, False]
