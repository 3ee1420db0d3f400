"""The codecs, one file each: how vectors become the bytes that travel. Another distribution may register more.

A setting names one, with parameters if need be: ``minmax8``, ``minmax8:block=512``.
"""

from __future__ import annotations

from dataclasses import fields

from lsgd.codecs.base import Codec
from lsgd.errors import ConfigError
from lsgd.registry import Registry

__all__ = ["CODECS", "Codec", "codec_of"]

CODECS: Registry[Codec] = Registry("lsgd.codecs", Codec, "codec")
"""Each by its name."""


def codec_of(text: str, block: int | None = None) -> Codec:
    """Return the codec that a setting names: ``minmax8``, ``topk:k=64``.

    Args:
        text: its name, and after a colon its parameters, between commas.
        block: for codecs that have a parameter of this name, where the text gives none; None: their own default.

    Raises:
        ConfigError: there is no such codec, or it has no such parameter or value.
    """
    name, colon, rest = text.partition(":")
    if name not in CODECS:
        raise ConfigError(CODECS.unknown(name))
    cls = CODECS[name]
    known = [field.name for field in fields(cls)]
    given: dict[str, int] = {}
    for pair in rest.split(",") if colon else ():
        parameter, _, value = pair.partition("=")
        if parameter not in known or not value.isdecimal():
            raise ConfigError(
                f"{pair!r} is no parameter of the codec {name}; "
                + (f"it takes {', '.join(f'{p}=NUMBER' for p in known)}" if known else "it takes none")
            )
        given[parameter] = int(value)
    if block is not None and "block" in known:
        given.setdefault("block", block)
    return cls(**given)
