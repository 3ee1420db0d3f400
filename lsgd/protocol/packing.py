"""Packs several frames into one part of a ZeroMQ message, because ZeroMQ takes 2 microseconds for each part."""

from collections.abc import Sequence

import msgpack

from lsgd.protocol.fields import MAX_ITEMS
from lsgd.protocol.messages import MAX_NBYTES

PACKED = b"\xc1"
"""First byte of several frames packed into one; no MessagePack, and so no frame, begins with it."""

_PACKING_NBYTES = 6  # most bytes before each frame of a part, and before the first


def pack(frames: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a ZeroMQ message that carries ``frames``: a frame alone as it is, several in one part.

    No part is longer than :data:`lsgd.protocol.messages.MAX_NBYTES`, as long as no frame is. Like the form of
    :class:`lsgd.protocol.messages.Refused`, this form never changes, so that any other version can read a refusal.
    """
    groups: list[list[bytes]] = []
    room = 0
    for frame in frames:
        room -= len(frame) + _PACKING_NBYTES
        if not groups or room < 0 or len(groups[-1]) == MAX_ITEMS:
            groups.append([])
            room = MAX_NBYTES - 2 * _PACKING_NBYTES - len(frame)
        groups[-1].append(frame)
    return [PACKED + msgpack.packb(group) if len(group) > 1 else group[0] for group in groups]


def unpack(parts: Sequence[bytes]) -> list[bytes]:
    """Return the frames that :func:`pack` packed; a badly packed part comes back as one invalid frame."""
    frames: list[bytes] = []
    for part in parts:
        frames += _unpacked(part) if part.startswith(PACKED) else (part,)
    return frames


def _unpacked(part: bytes) -> Sequence[bytes]:
    try:
        frames = msgpack.unpackb(
            part[len(PACKED) :],
            use_list=False,
            max_array_len=MAX_ITEMS,
            max_map_len=0,
            max_str_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return (part,)
    if type(frames) is not tuple:
        return (part,)
    if any(type(frame) is not bytes or frame.startswith(PACKED) for frame in frames):
        return (part,)
    return frames
