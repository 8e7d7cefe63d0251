"""Whole trainings on the CUDA device's own logic, over a simulated card that does everything at once: streams, events,
pinned slabs and the card's clock beside hooks, recorder, plans and replays."""

import pytest
import torch
from models import CASES, train
from simulated_card import SimulatedCard, SimulatedEvent, Stream

import delta
from delta.runtime import session
from delta.runtime.device.cuda import CudaDevice

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]
STEPS = 4


class PromptEvent(SimulatedEvent):
    def record(self, stream: Stream) -> None:
        super().record(stream)
        self.card.settle()


class PromptCard(SimulatedCard):
    """What is put into a stream has been done when the call returns, as what the program does on this host has. Memory
    that nobody holds any more is overwritten."""

    def new_event(self) -> PromptEvent:
        return PromptEvent(self)

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        super().copy(to, source, stream)
        self.settle()


@pytest.fixture
def card(monkeypatch) -> PromptCard:
    """Whatever device a session asks for, it gets this card's."""
    card = PromptCard()
    monkeypatch.setattr(session, "make_device", lambda name, host: CudaDevice(card, host))
    return card


@pytest.mark.parametrize("share", ["0%", "40%", "100%"])
@pytest.mark.parametrize("policy", ["swap", "recompute", "delta", "dtr", "mimose", "capuchin"])
@pytest.mark.parametrize("case", ["gpt", "cnn"])
def test_a_training_on_a_card_gives_the_same_bits(card, case, policy, share):
    plain = train(CASES[case], STEPS)
    with delta.evict(
        activations=share, policy=delta.load_policy(policy, {"filter.min_bytes": 0}), device="cuda"
    ) as run:
        evicted = train(CASES[case], STEPS)
    assert plain.differences(evicted) == []
    report = run.report()
    assert (report.swapped_out_bytes + report.recomputed_bytes > 0) == (share != "100%")
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)
    assert card.slabs == 0
