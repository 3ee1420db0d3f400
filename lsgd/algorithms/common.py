"""Settings that several algorithms have, declared once."""

from __future__ import annotations

from typing import Any

from lsgd.codecs import CODECS, Codec, codec_of
from lsgd.errors import ConfigError
from lsgd.settings import setting


def period() -> Any:
    """Declare how often an algorithm exchanges that does so now and then."""
    return setting(64, "iterations of a worker, on average, between exchanges", low=1, high=1 << 30)


def interval() -> Any:
    """Declare the same for one that exchanges in every step unless told otherwise."""
    return setting(1, "optimizer steps of a worker, on average, between exchanges", low=1, high=1 << 30)


def hierarchical() -> Any:
    """Declare whether nodes come first."""
    return setting(True, "average at full precision inside a node, then exchange between nodes only")


def codec(default: str, what: str) -> Any:
    """Declare which codec ``what`` travels in."""
    meaning = f"codec that {what} travel in, with its parameters: minmax8:block=512"
    return setting(default, meaning, choices=CODECS, valid=codec_of)


def block() -> Any:
    """Declare the parameter that codecs in blocks have in common."""
    return setting(
        2048,
        "numbers that share one range of codes; 0: all that travel in one piece",
        low=0,
        high=1 << 30,
        fixed=True,
    )


def rounding(default: str) -> Any:
    """Declare how a codec rounds."""
    return setting(
        default,
        "to the nearest code, or to one of the two beside at random, without bias",
        choices=("nearest", "stochastic"),
    )


def rounding_codec(text: str, block: int, rounding: str) -> Codec:
    """Return the codec of settings that have a rounding, too.

    Raises:
        ConfigError: the codec cannot round so.
    """
    codec = codec_of(text, block)
    if rounding == "stochastic" and not codec.stochastic:
        raise ConfigError(
            f"rounding = 'stochastic', but the codec {codec.name} rounds to the nearest only; "
            f"set rounding to nearest"
        )
    return codec
