"""Smaller forms of whole storages, decoded to the same bits; and one that tells less, for who asks no more.

`Bits` keeps one bit for each element of a storage whose elements have at most two values: bool masks, and the noise
that dropout multiplies with on a CPU. `Narrow` keeps integers in the narrowest type that spans what is there: indices
of max pooling, of `argmax`, of embeddings. Elements are compared as bit patterns. Bytes that do not fit the form (a
bool that is neither 0 nor 1, a third value, a wider range) are refused when it is made, never bent.

`Signs` is a stand-in. The backward of ReLU compares its output with zero and reads nothing else: one bit for each
element tells whether it is not below or equal to zero, which NaN is not.

All work through a storage in pieces of `PIECE` elements. Besides the two forms, encoding and decoding take at most 16
bytes for each element of a piece, 4 MiB. What does not fit is noted on the device and asked for once, at the end: on a
card every answer stops the host until all that went before is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from delta.runtime.view import View
from delta.types import Encoding

PIECE = 2**18  # elements, a multiple of 8

# One core of a server; enough to compare with replays and copies.
_BYTES_PER_S = 1e9  # of the wide form

_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> its bits
_NARROWER = {torch.int64: (torch.int8, torch.int16, torch.int32), torch.int32: (torch.int8, torch.int16)}
_SPREAD = 0x0101010101010101  # a byte times this is the byte eight times
_SELECT = 0x8040201008040201 - 2**64  # bit i of byte i
_CARRY = 0x7F7F7F7F7F7F7F7F  # added to a byte, sets its top bit unless the byte is 0
_GATHER = 0x0102040810204080  # eight bytes of 0 or 1 times this have their bits in the top byte, without carries


class Form(Protocol):
    """An encoded storage."""

    @property
    def nbytes(self) -> int: ...

    @property
    def storage(self) -> torch.UntypedStorage:
        """Where it is."""
        ...

    def decode(self) -> torch.UntypedStorage:
        """The storage again, bit by bit."""
        ...


class Codec(Protocol):
    """A way to encode storages."""

    def encoding(self, nbytes: int) -> Encoding:
        """What a storage of `nbytes` takes at most, and how long it takes, roughly."""
        ...

    def encode(self, storage: torch.UntypedStorage) -> Form | None:
        """The smaller form; None where these bytes have none."""
        ...


def codec_for(tensor: Tensor, made_by: Sequence[str], largest: int | None = None) -> Codec | None:
    """The codec that may suit the storage of a tensor, if one does.

    `made_by`: the op that made it, and before it the ops whose results it overwrote. `largest`: bound on its values.
    """
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.dtype in _NARROWER and nbytes % tensor.element_size() == 0:
        return Narrow(tensor.dtype, _narrowest(tensor.dtype, largest))
    noise = tuple(made_by[:2]) == ("aten.div_", "aten.bernoulli_")  # dropout on a CPU
    if (tensor.dtype is torch.bool or noise) and nbytes % tensor.element_size() == 0:
        return Bits(tensor.element_size()) if tensor.element_size() in _PATTERN else None
    return None


def _narrowest(dtype: torch.dtype, largest: int | None) -> torch.dtype:
    """The type that is sure to be enough, or else the widest one that still helps."""
    fitting = (t for t in _NARROWER[dtype] if largest is not None and largest < 2 ** (8 * t.itemsize))
    return next(fitting, _NARROWER[dtype][-1])


# -- two values -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Bits:
    """One bit for each element of `itemsize` bytes; single bytes have to be 0 or 1."""

    itemsize: int

    def encoding(self, nbytes: int) -> Encoding:
        took_ns = int(nbytes * 1e9 / _BYTES_PER_S)
        return Encoding(-(-nbytes // self.itemsize // 8), took_ns, took_ns)

    def encode(self, storage: torch.UntypedStorage) -> Form | None:
        with _unseen():
            elements = _over(storage, _PATTERN[self.itemsize])
            bits = _bitmap_for(elements)
            misfit = _nothing_yet(elements)
            zero, one = (0, 1) if self.itemsize == 1 else (int(elements[0]), None)
            for start, piece in _pieces(elements):
                ones = _eights(piece if self.itemsize == 1 else (piece != zero).view(torch.uint8))
                if self.itemsize == 1:
                    misfit |= (ones & ~_SPREAD).any()
                else:
                    if one is None and bool(ones.any()):
                        one = int(piece[ones.view(torch.uint8).argmax()])
                    if one is not None:
                        misfit |= (_eights((piece == one).view(torch.uint8)) != ones).any()
                _pack(ones, bits, start)
            if bool(misfit):
                return None
            return _Bitmap(bits, _PATTERN[self.itemsize], storage.nbytes(), zero, zero if one is None else one)


@dataclass(frozen=True, slots=True)
class Signs:
    """One bit for each element of ReLU's output, decoded to 1 where it was not `<= 0`, and to 0 elsewhere.

    Whether a subnormal number is `<= 0` depends on a setting of the thread that asks (`torch.set_flush_denormal`), so
    a storage that has one is refused.
    """

    dtype: torch.dtype

    def encoding(self, nbytes: int) -> Encoding:
        took_ns = int(nbytes * 1e9 / _BYTES_PER_S)
        return Encoding(-(-nbytes // self.dtype.itemsize // 8), took_ns, took_ns, stand_in=True)

    def encode(self, storage: torch.UntypedStorage) -> Form | None:
        pattern = _PATTERN[self.dtype.itemsize]
        with _unseen():
            elements = _over(storage, self.dtype)
            bits = _bitmap_for(elements)
            marks = torch.tensor([1.0, torch.finfo(self.dtype).tiny], dtype=self.dtype, device="cpu")
            one, normal = marks.view(pattern).tolist()
            misfit = _nothing_yet(elements)
            for start, piece in _pieces(elements):
                magnitudes = piece.view(pattern)
                misfit |= ((magnitudes > 0) & (magnitudes < normal)).any()
                _pack(_eights((piece <= 0).logical_not_().view(torch.uint8)), bits, start)
            if bool(misfit):
                return None
            return _Bitmap(bits, pattern, storage.nbytes(), 0, one)


@dataclass(frozen=True, slots=True)
class _Bitmap:
    bits: Tensor
    pattern: torch.dtype
    storage_bytes: int
    zero: int  # the element that a bit of 0 stands for
    one: int

    @property
    def nbytes(self) -> int:
        return self.bits.numel()

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.bits.untyped_storage()

    def decode(self) -> torch.UntypedStorage:
        with _unseen():
            storage = torch.UntypedStorage(self.storage_bytes, device=self.bits.device)
            for start, piece in _pieces(_over(storage, self.pattern)):
                ones = self.bits[start // 8 : (start + PIECE) // 8].to(torch.int64)
                ones.mul_(_SPREAD).bitwise_and_(_SELECT).add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_SPREAD)
                piece.copy_(ones.view(torch.uint8)[: piece.numel()])
                if (self.zero, self.one) != (0, 1):
                    piece.mul_(_wrapped(self.one - self.zero, self.pattern)).add_(self.zero)
            return storage


def _bitmap_for(elements: Tensor) -> Tensor:
    """Room for one bit for each element."""
    return torch.empty(-(-elements.numel() // 8), dtype=torch.uint8, device=elements.device)


def _nothing_yet(elements: Tensor) -> Tensor:
    """Where what does not fit is noted."""
    return torch.zeros((), dtype=torch.bool, device=elements.device)


def _pack(ones: Tensor, bits: Tensor, start: int) -> None:
    """The bits of a piece that begins at element `start`."""
    packed = (ones * _GATHER).bitwise_right_shift_(56).bitwise_and_(0xFF)
    bits[start // 8 : (start + PIECE) // 8].copy_(packed)


def _eights(bytes_: Tensor) -> Tensor:
    """Eight bytes at a time as one integer; zeros fill the last."""
    if bytes_.numel() % 8:
        bytes_ = torch.cat([bytes_, bytes_.new_zeros(-bytes_.numel() % 8)])
    return bytes_.view(torch.int64)


# -- integers ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Narrow:
    """Integers of type `wide` in a narrower one, at most `expected`, as distances from the middle of their range."""

    wide: torch.dtype
    expected: torch.dtype

    def encoding(self, nbytes: int) -> Encoding:
        took_ns = int(nbytes * 1e9 / _BYTES_PER_S)
        return Encoding(nbytes // self.wide.itemsize * self.expected.itemsize, took_ns, took_ns)

    def encode(self, storage: torch.UntypedStorage) -> Form | None:
        with _unseen():
            elements = _over(storage, self.wide)
            least, most = (int(end) for end in torch.stack(torch.aminmax(elements)).tolist())
            for narrow in _NARROWER[self.wide]:
                if narrow.itemsize <= self.expected.itemsize and most - least < 2 ** (8 * narrow.itemsize):
                    break
            else:
                return None
            middle = _wrapped(least + 2 ** (8 * narrow.itemsize - 1), self.wide)
            values = torch.empty(elements.numel(), dtype=narrow, device=elements.device)
            for start, piece in _pieces(elements):
                values[start : start + PIECE].copy_(piece - middle)
            return _Distances(values, middle, self.wide)


@dataclass(frozen=True, slots=True)
class _Distances:
    values: Tensor
    middle: int
    wide: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def decode(self) -> torch.UntypedStorage:
        with _unseen():
            nbytes = self.values.numel() * self.wide.itemsize
            storage = torch.UntypedStorage(nbytes, device=self.values.device)
            _over(storage, self.wide).copy_(self.values).add_(self.middle)
            return storage


def _wrapped(value: int, dtype: torch.dtype) -> int:
    """As integers of that type wrap around: the distances are right all the same."""
    half = 1 << (8 * dtype.itemsize - 1)
    return (value + half) % (2 * half) - half


# -- all --------------------------------------------------------------------------------------------------------------
class _unseen:
    """Ops in here are nobody's: no gradients, no dispatch modes."""

    def __enter__(self) -> None:
        self._no_grad = torch.no_grad()
        self._no_grad.__enter__()
        self._no_dispatch = torch._C._DisableTorchDispatch()

    def __exit__(self, *exc: object) -> None:
        del self._no_dispatch
        self._no_grad.__exit__(*exc)


def _over(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """All of a storage as elements of one type."""
    return View(dtype, (storage.nbytes() // dtype.itemsize,), (1,), 0, False, False).over(storage)


def _pieces(elements: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, elements.numel(), PIECE):
        yield start, elements[start : start + PIECE]
