"""Devices: where tensors live, and where their evicted copies go. `make_device` is the way in.

Torch, and the card's driver through it, is only touched when a device is made.
"""

import torch

from delta.config import HostConfig
from delta.errors import PolicyError
from delta.runtime.device.accelerator import CudaCard
from delta.runtime.device.base import Bandwidth, Device, HostBlock, OpClock, Ticket
from delta.runtime.device.chaos import ChaosDevice
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.cuda import CudaDevice

__all__ = ["Bandwidth", "Device", "HostBlock", "OpClock", "Ticket", "make_device"]


def make_device(name: str | torch.device | None, host: HostConfig) -> Device:
    """``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"chaos"`` or ``"chaos:SEED"``; None is the current card, or the CPU
    where there is none.

    PolicyError when the name is unknown or the card is not there; SwapError when the spill directory cannot be used.
    """
    text = str(name) if name is not None else "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = text.partition(":")
    if (number and not number.isdecimal()) or (kind == "cpu" and number not in ("", "0")):
        raise _unknown(text)
    match kind:
        case "cpu":
            return CpuDevice(host)
        case "cuda":
            return CudaDevice(CudaCard(_card_index(text, number)), host)
        case "chaos":
            return ChaosDevice(host, int(number or 0))
    raise _unknown(text)


def _card_index(text: str, number: str) -> int:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        build = "was built without CUDA" if torch.version.cuda is None else "finds no usable card"
        raise PolicyError(
            f'device={text!r}: this torch ({torch.__version__}) {build}; use device="cpu", or install what is missing'
        )
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        raise PolicyError(f"device={text!r}: there are {count} cards, cuda:0 to cuda:{count - 1}")
    return index


def _unknown(text: str) -> PolicyError:
    return PolicyError(f'device={text!r} is unknown: give "cpu", "cuda", "cuda:N", or "chaos:SEED" for tests')
