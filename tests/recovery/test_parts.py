"""Parts of snapshots: what is written is read, and damage is noticed."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import tensorflow as tf

from tfdist._src.snapshots.part_file import (
    DamagedError,
    PartFile,
    PartIndex,
    StoredArray,
    write_part,
)

TYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint32", "bool", "complex64"]


def test_what_is_written_is_read(tmp_path):
    for dtype, shape in itertools.product(TYPES, [(), (0,), (3,), (2, 3)]):
        numbers = np.arange(np.prod(shape)).reshape(shape) % 2
        values = numbers.astype(tf.as_dtype(dtype).as_numpy_dtype)
        stored = [StoredArray("a", values), StoredArray("b", values)]
        write_part(tmp_path / "part", stored, {"step": [1, None]})
        part = PartFile(tmp_path / "part", "part")
        assert part.keys == [("a", None), ("b", None)]
        assert part.document == {"step": [1, None]}
        read = part.values(1)
        assert (read.dtype, read.shape) == (values.dtype, values.shape)
        assert np.array_equal(read.astype("complex128"), values.astype("complex128"))
        assert PartFile((tmp_path / "part").read_bytes(), "sent").keys == part.keys


def test_each_damage_is_noticed(tmp_path):
    path = tmp_path / "part"
    write_part(path, [StoredArray("a", np.arange(1000.0))], {})
    good = path.read_bytes()
    for size in (0, 10, len(good) // 2, len(good) - 1):
        with pytest.raises(DamagedError, match="part of worker 3"):
            PartFile(good[:size], "part of worker 3")
    with pytest.raises(DamagedError, match="damaged"):
        PartFile(tmp_path / "nowhere", "a part")
    spoiled = bytearray(good)
    spoiled[good.index(np.arange(1000.0).tobytes()) + 4000] ^= 1
    with pytest.raises(DamagedError, match="CRC"):
        PartFile(bytes(spoiled), "a part").values(0)


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_part(tmp_path / "part", [StoredArray("a", np.zeros(3))], {})
    assert list(tmp_path.iterdir()) == []


def test_arrays_are_put_together_from_the_pieces_of_several_workers(tmp_path):
    whole = np.arange(10.0)
    for rank, (start, stop) in enumerate([(0, 4), (4, 7), (7, 10)]):
        stored = [
            StoredArray("slot", whole[start:stop], start),
            StoredArray(f"own {rank}", whole[:rank]),
        ]
        if rank == 1:
            stored.append(StoredArray("weight", whole.reshape(2, 5)))
        write_part(tmp_path / str(rank), stored, {"rank": rank})
    files = {rank: PartFile(tmp_path / str(rank), str(rank)) for rank in range(3)}
    parts = PartIndex(files, 3)
    assert np.array_equal(parts.whole("slot"), whole)
    assert np.array_equal(parts.whole("slot", (5, 2)), whole.reshape(5, 2))
    assert parts.whole("slot", (5, 3)).shape == (10,)
    assert np.array_equal(parts.whole("weight"), whole.reshape(2, 5))
    for start, stop in [(0, 4), (4, 7), (2, 9), (0, 10), (9, 10)]:
        assert np.array_equal(parts.elements("slot", start, stop), whole[start:stop])
        assert np.array_equal(parts.elements("weight", start, stop), whole[start:stop])
    with pytest.raises(KeyError):
        parts.elements("slot", 8, 11)
    with pytest.raises(KeyError):
        parts.whole("nothing")
    without = PartIndex({rank: files[rank] for rank in (0, 2)}, 3)
    with pytest.raises(KeyError):
        without.whole("slot")
    assert np.array_equal(without.elements("slot", 7, 10), whole[7:])
