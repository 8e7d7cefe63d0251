"""Which saved tensors are read by the backward of ReLU alone: when they are saved, and when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from delta.runtime.asker import asks_alone
from delta.runtime.codecs import Codec, Signs

_OPS = ("aten.relu", "aten.relu_")
_NODE = "ReluBackward0"
_SIZES = (2, 4, 8)  # bytes of an element


def stand_in_for(tensor: Tensor, made_by: Sequence[str]) -> Codec | None:
    """The codec for a stand-in, where the tensor is saved by a ReLU that made it; `made_by` as for `codec_for`.

    ReLU has recorded itself in `grad_fn` by the time it saves its result. What the name cannot tell, that somebody else
    saves it because other hooks took ReLU's own save, shows when backward asks (`relu_asks`).
    """
    if not made_by or made_by[0] not in _OPS or tensor.grad_fn is None or tensor.grad_fn.name() != _NODE:
        return None
    suits = tensor.is_floating_point() and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
    return Signs(tensor.dtype) if suits and tensor.element_size() in _SIZES else None


def relu_asks() -> bool:
    """Whether the saved tensor that is being unpacked is read by the backward of a ReLU and by nobody else."""
    return asks_alone(_NODE)
