"""The quantizer once more, in plain NumPy and from its description alone: what every path is compared with."""

import struct

import numpy as np

F32 = np.float32
MAGIC, VERSION, HEADER_NBYTES = b"LSGD", 2, 32
DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}


def aligned(nbytes):
    return (nbytes + 15) // 16 * 16


def philox(call, seed, rounds=7):
    """Philox4x32: the four words of one call, an integer, or of an array of calls (uint64)."""
    a, b, c, d = call % 2**32, call // 2**32, 0, 0
    key0, key1 = seed % 2**32, seed // 2**32
    return philox_words((a, b, c, d), (key0, key1), rounds)


def philox_words(counter, key, rounds):
    a, b, c, d = counter
    key0, key1 = key
    for _ in range(rounds):
        product0, product1 = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = product1 >> 32 ^ b ^ key0, product1 % 2**32, product0 >> 32 ^ d ^ key1, product0 % 2**32
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def random_bits(numel, seed):
    """16 bits for each element: element i takes half i % 2 of word i // 2 % 4 of call i // 8."""
    words = np.stack(philox(np.arange(-(-numel // 8), dtype=np.uint64), seed), axis=1)
    return np.stack([words & 0xFFFF, words >> 16], axis=2).reshape(-1)[:numel].astype(np.int64)


def quantize_block(x, bits):
    """Return lo, unit and codes of one block of float32; bits None: nearest."""
    if not np.isfinite(x).all():
        return F32(np.nan), F32(0), np.zeros(len(x), np.uint8)
    lo, hi = x.min() + F32(0), x.max() + F32(0)
    factor = F32(0.5) if max(abs(lo), abs(hi)) >= F32(2.0**126) else F32(1)
    unit = (hi * factor - lo * factor) / F32(255)
    if unit < F32(2.0**-126):
        return lo, F32(0), np.zeros(len(x), np.uint8)
    difference, inverse = x * factor - lo * factor, F32(1) / unit
    if bits is None:
        codes = np.rint(difference.astype(np.float64) * np.float64(inverse)).astype(np.int64)
    else:
        fixed = np.rint(difference * inverse * F32(65536)).astype(np.int64)
        codes = (np.clip(fixed, 0, 255 * 65536) + bits) // 65536
    return lo, unit / factor, np.clip(codes, 0, 255).astype(np.uint8)


def quantize(x, block, seed=None, dtype="float32"):
    """Return the payload, uint8, of a float32 vector that holds values of dtype."""
    numel, step = len(x), block or max(len(x), 1)
    blocks = -(-numel // step)
    bits = None if seed is None else random_bits(numel, seed)
    codes_offset = HEADER_NBYTES + aligned(8 * blocks)
    payload = np.zeros(codes_offset + aligned(numel), np.uint8)
    scales = np.zeros((blocks, 2), "<f4")
    with np.errstate(all="ignore"):
        for number in range(blocks):
            part = slice(number * step, min((number + 1) * step, numel))
            lo, unit, codes = quantize_block(x[part], None if bits is None else bits[part])
            scales[number] = lo, unit
            payload[codes_offset + part.start : codes_offset + part.stop] = codes
    flags = int(not np.isfinite(x).all())
    header = struct.pack("<4sBBHQII8s", MAGIC, VERSION, DTYPE_CODES[dtype], 0, numel, block or 0, flags, b"minmax8")
    payload[:HEADER_NBYTES] = np.frombuffer(header, np.uint8)
    payload[HEADER_NBYTES : HEADER_NBYTES + 8 * blocks] = scales.reshape(-1).view(np.uint8)
    return payload


def split(payload):
    """Return numel, block (in elements), scales and codes of a payload."""
    _, _, _, _, numel, block, _, _ = struct.unpack("<4sBBHQII8s", payload[:HEADER_NBYTES].tobytes())
    step = block or max(numel, 1)
    blocks = -(-numel // step)
    scales = payload[HEADER_NBYTES : HEADER_NBYTES + 8 * blocks].view("<f4").reshape(blocks, 2)
    codes_offset = HEADER_NBYTES + aligned(8 * blocks)
    return numel, step, scales, payload[codes_offset : codes_offset + numel]


def dequantize(payload):
    """Return the decoded vector, float32."""
    numel, step, scales, codes = split(payload)
    number = np.arange(numel) // step
    lo, unit = scales[number, 0], scales[number, 1]
    with np.errstate(all="ignore"):
        factor = np.where((abs(lo) >= F32(2.0**126)) | (unit >= F32(2.0**118)), F32(0.5), F32(1))
        value = lo * factor + codes.astype(F32) * (unit * factor)
        limit = np.finfo(F32).max / F32(2)
        return np.where(factor < 1, np.clip(value, -limit, limit), value) / factor


def reduce(payloads, weight):
    """Return weight times the sum of the decoded vectors, added in order."""
    total = dequantize(payloads[0])
    with np.errstate(all="ignore"):
        for payload in payloads[1:]:
            total = total + dequantize(payload)
        return total * F32(weight)
