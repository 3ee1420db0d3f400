"""Reasons: words that are a text, and the codes that go with them."""

import json

import pytest

from lsgd.protocol.messages import GenerationOver, decode, encode
from lsgd.server.reasons import NO_REASON, Reason, Why


def test_a_reason_is_its_words_and_its_code_goes_from_the_outside_to_the_inside() -> None:
    silent = Why.SILENT(quiet_s=6.2)
    left = Why.LEAVES(worker="node0/worker1", reason=silent, done=3)
    assert left == "node0/worker1 leaves: nothing was heard from it for 6 s (3 iterations)"
    assert (silent.code, left.code) == ("silent", "leaves.silent")
    assert Why.GENERATION(number=1, workers="", nodes="", transport="", why="", reason=NO_REASON).code == "generation"
    assert not NO_REASON and silent


def test_what_others_say_is_never_taken_for_places_of_values() -> None:
    assert Why.FAILED(error="KeyError: '{worker}'") == "failed: KeyError: '{worker}'"


def test_it_is_kept_whole_and_travels_as_a_text() -> None:
    reason = Why.RUN_OVER()
    again = Reason(*json.loads(json.dumps(reason.to_json())))
    assert (again, again.code) == (reason, "run_over")
    assert decode(encode(GenerationOver(1, reason))) == GenerationOver(1, "the run is over")


@pytest.mark.parametrize("why", Why)
def test_every_reason_has_words(why: Why) -> None:
    assert why.value and why.code == why.name.lower()
