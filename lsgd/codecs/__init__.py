"""The codecs, one file each, which turn vectors into payloads. Other distributions may register more.

A setting names one, optionally with parameters: ``minmax8``, ``minmax8:block=512``.
"""

from __future__ import annotations

from dataclasses import fields

from lsgd.codecs.base import Codec
from lsgd.errors import ConfigError
from lsgd.registry import Registry

__all__ = ["CODECS", "OWN_BLOCK", "Codec", "codec_of"]

CODECS: Registry[Codec] = Registry("lsgd.codecs", Codec, "codec")
"""The codec classes, by name."""

OWN_BLOCK = -1
"""The setting ``block`` of those who leave it to the codec."""


def codec_of(text: str, block: int = OWN_BLOCK) -> Codec:
    """Return the codec that a setting names: ``minmax8``, ``topk:k=64,...``; ``block`` counts unless the text sets it.

    Raises ConfigError if the codec, a parameter or a value does not exist.
    """
    name, colon, rest = text.partition(":")
    if name not in CODECS:
        raise ConfigError(CODECS.unknown(name))
    cls = CODECS[name]
    known = [field.name for field in fields(cls)]
    takes = f"it takes {', '.join(f'{p}=NUMBER' for p in known)}" if known else "it takes none"
    given: dict[str, int] = {}
    for pair in rest.split(",") if colon else ():
        parameter, _, value = pair.partition("=")
        parameter = cls.former_names.get(parameter, parameter)
        if parameter not in known or not value.isdecimal():
            raise ConfigError(f"{pair!r} is not a parameter of the codec {name}; {takes}")
        given[parameter] = int(value)
    if block != OWN_BLOCK:
        if "block" not in known:
            raise ConfigError(f"block = {block} is not for the codec {name}, which has no parameter block; {takes}")
        given.setdefault("block", block)
    return cls(**given)
