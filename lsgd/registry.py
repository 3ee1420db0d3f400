"""Classes that a setting chooses by name: those of lsgd's own package, and those of other distributions."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import logging
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

entry_points = functools.cache(importlib.metadata.entry_points)
"""All entry points, read once: with a hundred distributions installed, that takes 40 ms."""


class Registry(Mapping[str, type[T]], Generic[T]):
    """Classes by their ``name``, found at first use.

    lsgd's own are found by searching a package, which needs no installation. Others come from entry points, whose name
    is the class's name. One that cannot be loaded is skipped with a warning; the others still load.

    ``package`` is also the group of the entry points, and ``what`` the word for one of the classes in messages.

    Attributes:
        requirements: what pip installs for those that are not lsgd's own, by name; complete after ``classes``.
    """

    def __init__(self, package: str, base: type[T], what: str) -> None:
        self._package, self._base, self._what = package, base, what
        self.requirements: dict[str, str] = {}
        self._broken: dict[str, str] = {}

    @functools.cached_property
    def classes(self) -> dict[str, type[T]]:
        """All of them by name, lsgd's own first."""
        found = {name: cls for name, cls in sorted(self._ours())}
        for entry in sorted(entry_points().select(group=self._package)):
            requirement = f"{entry.dist.name}=={entry.dist.version}" if entry.dist else ""
            try:
                cls = entry.load()
                if not (isinstance(cls, type) and issubclass(cls, self._base)):
                    raise TypeError(f"{entry.value} is not a subclass of {self._base.__name__}")
                if getattr(cls, "name", "") != entry.name or entry.name in found:
                    raise ValueError(f"the name {entry.name!r} is taken, or is not the name of {entry.value}")
            except Exception as error:  # third-party code may raise anything
                self._broken[entry.name] = f"{requirement}: {type(error).__name__}: {error}"
                log.warning("the %s %r is skipped: %s", self._what, entry.name, self._broken[entry.name])
                continue
            found[entry.name] = cls
            self.requirements[entry.name] = requirement
        return found

    def _ours(self) -> Iterator[tuple[str, type[T]]]:
        package = importlib.import_module(self._package)
        for info in pkgutil.iter_modules(package.__path__, f"{self._package}."):
            for value in vars(importlib.import_module(info.name)).values():
                is_one = isinstance(value, type) and issubclass(value, self._base)
                if is_one and value.__module__ == info.name and "name" in vars(value):
                    yield value.name, value

    def requirement(self, name: str) -> str:
        """Return what pip installs to have it, ``distribution==version``; empty for lsgd's own."""
        return self.requirements.get(name, "") if name in self.classes else ""

    def versions(self) -> dict[str, str]:
        """Return the distributions that registered a class, with their versions."""
        pairs = (self.requirement(name).partition("==") for name in self)
        return {distribution: version for distribution, _, version in pairs if distribution}

    def unknown(self, name: object) -> str:
        """Return the error message for an unknown name."""
        if isinstance(name, str) and name in self._broken:
            return f"{self._what} {name!r} cannot be loaded from {self._broken[name]}"
        known = sorted(self)
        close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        question = f"did you mean {close[0]!r}? " if close else ""
        return f"{self._what} {name!r} is unknown; {question}known: {', '.join(known)}"

    def __getitem__(self, name: str) -> type[T]:
        return self.classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.classes)

    def __len__(self) -> int:
        return len(self.classes)
