"""Codecs: every storage comes back bit by bit, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from delta.runtime import codecs
from delta.runtime.codecs import Bits, Codec, Narrow, Signs, codec_for

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
QUICK = settings(deadline=None, max_examples=60)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few elements are several pieces."""
    monkeypatch.setattr(codecs, "PIECE", 16)


def raw(storage: torch.UntypedStorage) -> bytes:
    return bytes(storage.tolist())


def there_and_back(codec: Codec, storage: torch.UntypedStorage) -> int | None:
    """Bytes of the form, when the same bytes have come back; None if there is none."""
    before = raw(storage)
    form = codec.encode(storage)
    assert raw(storage) == before, "encoding changes nothing"
    if form is None:
        return None
    assert form.nbytes <= codec.encoding(storage.nbytes()).nbytes
    assert raw(form.decode()) == before
    assert raw(form.decode()) == before, "a form can be decoded more than once"
    return form.nbytes


def bits_of(itemsize: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (8 * itemsize - 1)), 2 ** (8 * itemsize - 1) - 1)


# -- bits -------------------------------------------------------------------------------------------------------------
@QUICK
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.booleans())
def test_bools(values, through_a_view):
    tensor = torch.tensor(values)
    if through_a_view:  # the whole storage counts, however the tensor looks at it
        tensor = tensor[len(values) // 2 :: 2]
    assert there_and_back(Bits(1), tensor.untyped_storage()) == -(-len(values) // 8)


@QUICK
@given(st.sampled_from([2, 4, 8]), st.data())
def test_any_two_values(itemsize, data):
    two = data.draw(st.lists(bits_of(itemsize), min_size=1, max_size=2))
    values = data.draw(st.lists(st.sampled_from(two), min_size=1, max_size=60))
    storage = torch.tensor(values, dtype=PATTERNS[itemsize]).untyped_storage()
    assert there_and_back(Bits(itemsize), storage) == -(-len(values) // 8)


@QUICK
@given(st.sampled_from([2, 4, 8]), st.data())
def test_a_third_value_is_refused_wherever_it_is(itemsize, data):
    three = data.draw(st.lists(bits_of(itemsize), min_size=3, max_size=3, unique=True))
    values = data.draw(st.lists(st.sampled_from(three[:2]), min_size=2, max_size=60))
    values[:2] = three[:2]
    values.insert(data.draw(st.integers(0, len(values))), three[2])
    storage = torch.tensor(values, dtype=PATTERNS[itemsize]).untyped_storage()
    assert there_and_back(Bits(itemsize), storage) is None


@QUICK
@given(st.lists(st.integers(0, 1), max_size=40), st.integers(2, 255), st.lists(st.integers(0, 1), max_size=40))
def test_a_bool_that_is_neither_0_nor_1_is_refused(before, odd, after):
    storage = torch.tensor([*before, odd, *after], dtype=torch.uint8).untyped_storage()
    assert there_and_back(Bits(1), storage) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_noise_of_dropout(dtype):
    noise = torch.empty(77, dtype=dtype).bernoulli_(0.7).div_(0.7)
    assert there_and_back(Bits(noise.element_size()), noise.untyped_storage()) == 10
    noise[5] = float("nan")
    assert there_and_back(Bits(noise.element_size()), noise.untyped_storage()) is None
    assert there_and_back(Bits(4), torch.tensor([-0.0, 0.0, -0.0]).untyped_storage()) == 1  # not the same bits


# -- integers ---------------------------------------------------------------------------------------------------------
@QUICK
@given(st.sampled_from([torch.int64, torch.int32]), st.data())
@example(torch.int64, None)
def test_integers(wide, data):
    least, most = torch.iinfo(wide).min, torch.iinfo(wide).max
    if data is None:
        values = [most, most - 255]
    else:
        low = data.draw(st.integers(least, most))
        high = data.draw(st.integers(low, min(most, low + data.draw(st.sampled_from([0, 255, 256, 65535, 2**32])))))
        values = data.draw(st.lists(st.integers(low, high), min_size=1, max_size=60))
    expected = torch.int32 if wide is torch.int64 else torch.int16
    nbytes = there_and_back(Narrow(wide, expected), torch.tensor(values, dtype=wide).untyped_storage())
    width = next((w for w in (1, 2, 4) if max(values) - min(values) < 256**w), 8)
    assert nbytes == (len(values) * width if width <= expected.itemsize else None)


def test_a_wider_range_than_expected_is_refused():
    storage = torch.tensor([0, 256]).untyped_storage()
    assert there_and_back(Narrow(torch.int64, torch.int8), storage) is None
    assert there_and_back(Narrow(torch.int64, torch.int16), storage) == 4


# -- signs ------------------------------------------------------------------------------------------------------------
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def backward_of_relu(result: Tensor) -> Tensor:
    """As autograd computes it, for a gradient with a different number at each place."""
    gradient = torch.arange(1, result.numel() + 1, dtype=result.dtype).view(result.shape)
    return torch.ops.aten.threshold_backward(gradient, result, 0)


def answers(result: Tensor) -> Tensor:
    """What decoding gives in place of a result of ReLU."""
    before = raw(result.untyped_storage())
    form = Signs(result.dtype).encode(result.untyped_storage())
    assert form is not None
    assert raw(result.untyped_storage()) == before, "encoding changes nothing"
    expected = Signs(result.dtype).encoding(len(before))
    assert form.nbytes == expected.nbytes == -(-result.numel() // 8)
    assert expected.stand_in
    return torch.empty(0, dtype=result.dtype).set_(form.decode(), 0, result.size(), result.stride())


@QUICK
@given(st.sampled_from(FLOATING), st.lists(st.floats(width=16), min_size=1, max_size=60))
@example(torch.float32, [float("nan"), -0.0, 0.0, float("inf"), float("-inf"), 1.0, -1.0, 3.5, -float("nan")])
def test_signs_answer_as_the_result_does(dtype, values):
    result = torch.tensor(values, dtype=dtype)
    result[(result.abs() > 0) & (result.abs() < torch.finfo(dtype).tiny)] = 0
    stand_in = answers(result)
    assert torch.equal(backward_of_relu(stand_in), backward_of_relu(result))
    assert torch.equal(stand_in <= 0, result <= 0)
    assert torch.equal(stand_in, (~(result <= 0)).to(dtype))


@pytest.mark.parametrize("dtype", FLOATING)
def test_signs_of_every_half_of_a_batch(dtype):
    result = torch.randn(7, 33, dtype=dtype).relu_().t()  # the whole storage counts, however the tensor looks at it
    assert torch.equal(backward_of_relu(answers(result)), backward_of_relu(result))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("at", [0, 20, 40])
def test_a_subnormal_number_has_no_sign_to_rely_on(dtype, at):
    """For a thread that flushes them it is zero."""
    result = torch.ones(41, dtype=dtype)
    result[at] = torch.finfo(dtype).tiny
    assert torch.equal(answers(result), torch.ones(41, dtype=dtype))
    result[at] = torch.finfo(dtype).smallest_normal / 2
    assert result[at] > 0
    assert Signs(dtype).encode(result.untyped_storage()) is None


# -- which ------------------------------------------------------------------------------------------------------------
MASK, INDEX, FLOATS = torch.tensor([True] * 8), torch.arange(8), torch.ones(8)
NOISE = ("aten.div_", "aten.bernoulli_")


@pytest.mark.parametrize(
    ("tensor", "made_by", "largest", "codec"),
    [
        (MASK, (), None, Bits(1)),
        (MASK[2:], ("aten.gt",), None, Bits(1)),
        (INDEX, ("aten.argmax",), None, Narrow(torch.int64, torch.int32)),
        (INDEX, (), 255, Narrow(torch.int64, torch.int8)),
        (INDEX, (), 256, Narrow(torch.int64, torch.int16)),
        (INDEX, (), 2**40, Narrow(torch.int64, torch.int32)),
        (INDEX.int(), (), None, Narrow(torch.int32, torch.int16)),
        (FLOATS, NOISE, None, Bits(4)),
        (FLOATS.double(), (*NOISE, "aten.empty"), None, Bits(8)),
        (FLOATS.to(torch.complex128), NOISE, None, None),
        (FLOATS, ("aten.div_",), None, None),
        (FLOATS, NOISE[::-1], None, None),
        (FLOATS, (), None, None),
        (INDEX.to(torch.uint8), (), None, None),
    ],
)
def test_which_codec_suits(tensor: Tensor, made_by: tuple[str, ...], largest: int | None, codec: Any) -> None:
    assert codec_for(tensor, made_by, largest) == codec


def test_a_storage_that_is_no_whole_number_of_elements_has_none():
    storage = torch.zeros(9, dtype=torch.uint8).untyped_storage()
    assert codec_for(torch.empty(0, dtype=torch.int64).set_(storage, 0, (1,)), ()) is None


def test_what_encoding_takes_besides_is_bounded(monkeypatch):
    """Temporary memory is that of one piece, however large the storage."""
    monkeypatch.setattr(codecs, "PIECE", 2**12)
    tensor = torch.empty(2**16).bernoulli_(0.5)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **kwargs or {})
            if isinstance(result, Tensor) and result.untyped_storage()._cdata not in ours:
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    ours = {tensor.untyped_storage()._cdata}
    monkeypatch.setattr(codecs, "_unseen", torch.no_grad)
    with Largest():
        form = Bits(4).encode(tensor.untyped_storage())
    assert form is not None
    assert 0 < largest <= 8 * 2**12
