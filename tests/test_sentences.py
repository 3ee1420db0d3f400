"""What lsgd says stands once, in tests/sentences: elsewhere tests ask for codes."""

import re

import pytest

from tests import golden


def test_the_reasons_are_those_that_are_kept() -> None:
    assert golden.REASONS.read_text(encoding="utf-8") == golden.reasons(), "python -m tests.golden writes them anew"


def test_every_sentence_has_a_test_that_asks_for_it() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in golden.TESTS.rglob("*.py"))
    asked = set(re.findall(r'golden\.(?:text|pattern)\(\s*"([\w.]+)"', tests))
    assert asked == {f"{area}.{name}" for area, said in golden.SAID.items() for name in said}


def test_hardly_any_assert_compares_a_sentence() -> None:
    compare, of = golden.count()
    assert of > 6000 and compare <= 150


def test_a_pattern_is_literal_but_for_its_places(monkeypatch) -> None:
    code = "some.sentence"
    monkeypatch.setitem(golden.SAID, "some", {"sentence": r"{path} (a.b) has <\d+> of {count}"})
    assert golden.pattern(code, path="/a+b", count=3) == r"/a\+b \(a\.b\) has \d+ of 3"
    assert golden.text(code, path="/a+b", count=3) == r"/a+b (a.b) has <\d+> of 3"
    with pytest.raises(AssertionError, match="has no place other"):
        golden.text(code, other="")
