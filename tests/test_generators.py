"""Which generator an op draws from, and how it is set back."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from delta.runtime.generators import default_generator, drawn_from, run_seeded, set_back
from delta.runtime.opfacts import facts_of

aten = torch.ops.aten
CPU = torch.device("cpu")


def test_an_op_that_draws_nothing_has_none() -> None:
    assert drawn_from(facts_of(aten.sin.default), (torch.ones(2),), {}, CPU) == (None, None)


@pytest.mark.parametrize("by_name", [True, False])
def test_the_generator_that_is_given_is_drawn_from(by_name: bool) -> None:
    own = torch.Generator().manual_seed(7)
    args, kwargs = ((torch.ones(2), 0.5), {"generator": own}) if by_name else ((torch.ones(2), 0.5, own), {})
    generator, state = drawn_from(facts_of(aten.bernoulli_.float), args, kwargs, CPU)
    assert generator is own and state is not None and torch.equal(state, own.get_state())


def test_else_it_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn_from(facts_of(aten.bernoulli_.float), (torch.ones(2), 0.5), {}, CPU)[0] is torch.default_generator
    cards = [SimpleNamespace(get_state=lambda: None) for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "default_generators", cards)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert drawn_from(facts_of(aten.rand.default), ((2,),), {}, torch.device("cuda", 0))[0] is cards[0]
    assert default_generator(torch.device("cuda")) is cards[1]


def test_what_is_run_again_draws_the_same_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    drawn = torch.rand(4)
    now = torch.get_rng_state()
    again: Any = run_seeded(aten.rand.default, torch.default_generator, state, [(4,)], {})
    assert torch.equal(again, drawn) and torch.equal(torch.get_rng_state(), now)
    set_back(torch.default_generator, state)
    assert torch.equal(torch.rand(4), drawn)
    set_back(None, None)


class Meanwhile:
    """An op, just before which another thread draws from the generator that all share."""

    _schema = aten.bernoulli_.float._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=torch.rand, args=(7,))
        thread.start()
        thread.join()
        return aten.bernoulli_.float(*args, **kwargs)


@pytest.mark.parametrize("given", [False, True])
def test_what_another_thread_draws_meanwhile_changes_nothing_and_stays_drawn(given: bool) -> None:
    generator = torch.Generator().manual_seed(3) if given else torch.default_generator
    state = generator.get_state()
    drawn = torch.ones(64).bernoulli_(0.5, generator=generator)
    before = torch.get_rng_state()
    torch.rand(7)
    expected = torch.get_rng_state()
    torch.set_rng_state(before)

    op: Any = Meanwhile()
    kwargs = {"generator": generator} if given else {}
    again: Any = run_seeded(op, generator, state, [torch.ones(64), 0.5], kwargs)
    assert torch.equal(again, drawn)
    assert torch.equal(torch.get_rng_state(), expected)


def test_on_cuda_cudnn_does_not_hear_of_it() -> None:
    """It would take it for a new seed, and draw the dropout of recurrent nets anew."""
    told: list[object] = []
    numbers = SimpleNamespace(set_state=told.append)
    generator: Any = SimpleNamespace(device=torch.device("cuda"), graphsafe_get_state=lambda: numbers)
    state = torch.zeros(16, dtype=torch.uint8)
    set_back(generator, state)
    assert told == [state]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:.*weights are not part of single contiguous chunk:UserWarning")
def test_the_dropout_of_a_recurrent_net_on_a_card_stays_what_it_was() -> None:
    def steps(seeded: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5, device="cuda")
        x, found = torch.randn(4, 3, 8, device="cuda"), list[torch.Tensor]()
        for _ in range(3):
            found.append(net(x)[0])
            if seeded:
                generator = default_generator(x.device)
                run_seeded(aten.rand.default, generator, generator.get_state(), [(4,)], {"device": "cuda"})
        return found

    assert all(map(torch.equal, steps(False), steps(True)))
