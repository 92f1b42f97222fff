"""The result of an exchange on the wire: equal payloads are sent once."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.cluster.net.framing import Header, encode


def encode_result(sequence: int, payloads: Sequence[bytes]) -> bytes:
    """The frame with the payloads of all ranks.

    Workers mostly agree, so its size mostly does not depend on their number.

    Args:
        sequence: number of the exchange.
        payloads: of all ranks, in rank order.

    Example:
        >>> len(encode_result(0, [b"same"] * 1000)) < 100
        True
    """
    numbers: dict[bytes, int] = {}
    runs: list[list[int]] = []
    for payload in payloads:
        number = numbers.setdefault(payload, len(numbers))
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    sizes = [len(payload) for payload in numbers]
    header = {"kind": "result", "sequence": sequence, "sizes": sizes, "runs": runs}
    return encode(header, b"".join(numbers))


def decode_result(header: Header, payload: bytes, ranks: int) -> list[bytes]:
    """The payloads of all ranks, in rank order.

    Raises:
        LookupError, TypeError, ValueError: the frame is malformed.
    """
    if sum(count for _, count in header["runs"]) != ranks:
        raise ValueError(header["runs"])
    distinct, start = [], 0
    for size in header["sizes"]:
        distinct.append(payload[start : start + size])
        start += size
    return [distinct[number] for number, count in header["runs"] for _ in range(count)]
