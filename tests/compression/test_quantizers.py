"""Every codec that the core runs, against its paper's formula, and the rules that all obey."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.compression import references
from tests.harness.tiers import exhaustive
from tfdist.compression import CODECS, FP16, QSGD, Int8, Quantizer, Signum, TernGrad

# Signum encodes as SignSGD does.
QUANTIZERS = {
    name: kind
    for name, kind in CODECS.items()
    if issubclass(kind, Quantizer) and kind is not Signum
}
COUNTS = [0, 1, 7, 256, 1003]


def draw(count: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, count).astype(np.float32)


def there(codec: Quantizer, values: np.ndarray, error=None, seed: int = 5) -> np.ndarray:
    encoding = codec._encoding
    return encoding.decode(encoding.encode(values, error, seed), values.size)


def test_every_quantizer_has_a_reference():
    assert set(QUANTIZERS) == set(references.EXACT) | set(references.RANDOM)


@pytest.mark.parametrize("name", references.EXACT)
def test_every_quantizer_follows_its_formula(name):
    for count in COUNTS:
        check_formula(name, count)


def check_formula(name, count):
    codec = QUANTIZERS[name]()
    values = draw(count)
    expected = [
        references.EXACT[name](block) for block in references.blocks(values, codec._encoding.block)
    ]
    result = there(codec, values)
    # The last bits of a mean or a scale may tip a value that is half-way.
    apart = np.abs(result - np.concatenate([*expected, []])) > 1e-5
    assert apart.sum() <= count / 200, count


@exhaustive
@pytest.mark.parametrize(
    ("codec", "reference"),
    [
        *((QUANTIZERS[name](), reference) for name, reference in references.RANDOM.items()),
        (QSGD(bits=4), lambda x: references.qsgd(x, 4)),
        (Int8(stochastic=True), references.int8_stochastic),
    ],
    ids=[*references.RANDOM, "qsgd of 4 bits", "int8 at random"],
)
def test_random_quantizers_follow_their_formula(codec, reference):
    values = draw(200)
    below, above, probability = reference(values)
    results = np.stack([there(codec, values, seed=seed) for seed in range(3000)])
    is_below = np.isclose(results, below, rtol=1e-5, atol=1e-6)
    is_above = np.isclose(results, above, rtol=1e-5, atol=1e-6)
    assert np.all(is_below | is_above)
    # Where both are the same, there is nothing to choose.
    drawn = np.where(np.isclose(below, above), probability, is_above.mean(axis=0))
    deviation = np.sqrt(probability * (1 - probability) / len(results))
    assert np.all(np.abs(drawn - probability) <= 5 * deviation + 10 / len(results))


@pytest.mark.parametrize("name", references.RANDOM)
def test_the_seed_decides(name):
    codec, values = QUANTIZERS[name](), draw(1000)
    first = there(codec, values, seed=1)
    assert np.array_equal(first, there(codec, values, seed=1))
    assert not np.array_equal(first, there(codec, values, seed=2))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_is_lost_is_kept(name):
    codec = QUANTIZERS[name]()
    values, before = draw(1003), draw(1003, seed=1, scale=0.1)
    error = before.copy()
    result = there(codec, values, error)
    np.testing.assert_allclose(result + error, values + before, atol=2e-6)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zeros_stay_zeros(name):
    assert not np.any(there(QUANTIZERS[name](), np.zeros(600, np.float32)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_block_that_is_not_finite_is_lost_alone(name, value):
    """A block that holds one is lost, and its error stays, so that a step can be skipped."""
    codec = QUANTIZERS[name]()
    size = codec._encoding.block
    values, before = draw(3 * size), draw(3 * size, seed=1)
    values[size] = value
    error = before.copy()
    result = there(codec, values, error)
    assert np.isnan(result[size : 2 * size]).all()
    assert np.isfinite(np.delete(result, slice(size, 2 * size))).all()
    assert np.array_equal(error[size : 2 * size], before[size : 2 * size])


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e37])
@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n != "signsgd"])
def test_tiny_and_huge_values(name, scale):
    """The same as of ordinary ones, only larger or smaller."""
    codec, values = QUANTIZERS[name](), draw(1003).clip(-3, 3)
    factor = np.float32(2.0 ** np.round(np.log2(scale)))
    result = there(codec, values * factor) / factor
    np.testing.assert_allclose(result, there(codec, values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_encodings_have_the_size_that_is_declared(name):
    codec = QUANTIZERS[name]()
    for count in COUNTS:
        size = codec._encoding.encode(draw(count)).size
        assert size == codec._encoding.bytes(count)
    whole = 100 * codec._encoding.block
    assert 8 * codec._encoding.bytes(whole) == pytest.approx(codec.bits_per_value((whole,)) * whole)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_codecs_are_values(name):
    codec = QUANTIZERS[name]()
    assert codec == QUANTIZERS[name]() and hash(codec) == hash(QUANTIZERS[name]())
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.block = 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QSGD(bits=3), "2, 4 or 8 bits"),
        (lambda: FP16(block=12), "multiple of 8"),
        (lambda: Int8(block=0), "`block`"),
        (lambda: Int8(block=8192), "at most 4096"),
        (lambda: Int8(block=8.0), "Int8: `block` must be of type int. Received: 8.0"),
        (lambda: Int8(stochastic="no"), "`stochastic` must be of type bool. Received: 'no'"),
        (lambda: Int8(warmup_steps=True), "`warmup_steps` must be of type int. Received: True"),
        (lambda: TernGrad(clip=float("nan")), "`clip`"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_wrong_arrays_are_refused():
    encoding = Int8()._encoding
    with pytest.raises(ValueError, match="contiguous float32"):
        encoding.encode(np.zeros(4))
    with pytest.raises(ValueError, match="shape"):
        encoding.encode(np.zeros(4, np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="4 values are encoded in 8 bytes"):
        encoding.decode(np.zeros(9, np.uint8), 4)
