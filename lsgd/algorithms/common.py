"""Settings that several algorithms have, declared once."""

from __future__ import annotations

from typing import Any

from lsgd.codecs import CODECS, Codec, codec_of
from lsgd.errors import ConfigError
from lsgd.settings import setting


def period() -> Any:
    """Declare the period of an algorithm that exchanges rarely."""
    return setting(64, "iterations of a worker, on average, between exchanges", low=1, high=1 << 30)


def interval() -> Any:
    """Declare the period of an algorithm that by default exchanges in every step."""
    return setting(1, "optimizer steps of a worker, on average, between exchanges", low=1, high=1 << 30)


def hierarchical() -> Any:
    """Declare whether workers of a node average first."""
    return setting(True, "average at full precision inside a node, then exchange between nodes only")


def codec(default: str, what: str) -> Any:
    """Declare the codec of ``what``."""
    meaning = f"codec for {what}, with its parameters: minmax8:block=512"
    return setting(default, meaning, choices=CODECS, valid=codec_of)


def block() -> Any:
    """Declare the parameter that block codecs share."""
    return setting(
        2048,
        "elements that share one range of codes; 0: all elements of a message",
        low=0,
        high=1 << 30,
        fixed=True,
    )


def fragments() -> Any:
    """Declare into how many parts a model is cut, of which a round exchanges one."""
    return setting(
        1,
        "parts of the model, exchanged in turn: each once in a period, one a round",
        low=1,
        high=1 << 16,
        fixed=True,
    )


def delay(what: str) -> Any:
    """Declare how long after a round its result is taken over."""
    return setting(0, f"{what} this many iterations after its round, to hide the transfer", low=0, fixed=True)


def rounding(default: str) -> Any:
    """Declare how a codec rounds."""
    return setting(
        default,
        "to the nearest code, or at random to one of the two neighbors, without bias",
        choices=("nearest", "stochastic"),
    )


def rounding_codec(text: str, block: int, rounding: str) -> Codec:
    """Return the codec of settings that also have a rounding.

    Raises:
        ConfigError: the codec does not support this rounding.
    """
    codec = codec_of(text, block)
    if rounding == "stochastic" and not codec.stochastic:
        raise ConfigError(
            f"rounding = 'stochastic', but the codec {codec.name} only rounds to nearest; set rounding to nearest"
        )
    return codec
