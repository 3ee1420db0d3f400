"""How many examples hypothesis tries: few each time, and many when somebody looks for more (CONTRIBUTING.md)."""

from typing import Any

from hypothesis import settings


def examples(count: int, **options: Any) -> settings:
    """Return settings with so many examples, or as many times more as the profile has more than 100, or fewer."""
    return settings(max_examples=max(1, count * settings().max_examples // 100), **options)
