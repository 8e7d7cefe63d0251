"""Swap or recompute: decision tables by hand. Units: bytes, ns."""

from dataclasses import replace

import pytest

from delta.config import Rule
from delta.costs import LinkQueue
from delta.director import Choice, Director, Prospect
from delta.types import Action, Link

ALL = (Action.KEEP, Action.SWAP, Action.RECOMPUTE)
PCIE = Link(12e9, 12e9)  # 12 GB/s each way: 12 bytes a ns
MB12 = 12_000_000  # so 1,000,000 ns each way

# Its room is needed at once, and it is next used in 10 ms: the copy out is exposed (1 ms), the copy back hidden.
PROSPECT = Prospect(MB12, "aten.gelu", "net.mlp", 300_000, False, True, 0, 10_000_000)


def choose(director=None, queue=None, **changes) -> Choice | None:
    return (director or Director(ALL)).choose(replace(PROSPECT, **changes), queue or LinkQueue(PCIE))


# -- the cheapest -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("chain_ns", "next_use_ns", "action", "cost_ns"),
    [
        # recompute 0.3 ms against 1 ms of waiting for the copy out
        (300_000, 10_000_000, Action.RECOMPUTE, 300_000),
        # a long chain: 5 ms against 1 ms
        (5_000_000, 10_000_000, Action.SWAP, 1_000_000),
        # the value is due again before it can be back (1 ms out + 1 ms in): 0.5 ms more exposed
        (1_400_000, 1_500_000, Action.RECOMPUTE, 1_400_000),
        (1_600_000, 1_500_000, Action.SWAP, 1_500_000),
    ],
)
def test_exposed_swaps_against_chains(chain_ns, next_use_ns, action, cost_ns):
    assert choose(chain_ns=chain_ns, next_use_ns=next_use_ns) == Choice(action, cost_ns)


@pytest.mark.parametrize(
    ("chain_ns", "action", "cost_ns"),
    [(1_999_999, Action.RECOMPUTE, 1_999_999), (2_000_001, Action.SWAP, 2_000_000)],
)
def test_delta_paper_counts_the_whole_way_out_and_back(chain_ns, action, cost_ns):
    """12 MB at 12 GB/s: 1 ms out and 1 ms back, though the way back would be hidden here."""
    director = Director(ALL, hidden_swap=False)
    found = choose(director, chain_ns=chain_ns, next_use_ns=99_000_000)
    assert found == Choice(action, cost_ns)


def test_the_whole_way_has_what_is_taken_for_each_copy_whatever_its_size():
    director = Director(ALL, hidden_swap=False)
    queue = LinkQueue(Link(PCIE.out_bytes_per_s, PCIE.in_bytes_per_s, copy_ns=300))
    assert choose(director, queue, chain_ns=9_000_000) == Choice(Action.SWAP, 2_000_600)
    assert choose(director, queue, chain_ns=2_000_599).action is Action.RECOMPUTE


def test_the_published_unit_slip_would_turn_the_decision_round():
    """DELTA's code: 2 m / B / c > 1 means recompute, with B in bytes per MICROsecond and c in NANOseconds.

    12 MB, B = 12 GB/s = 12,000 bytes/us, an op of 300,000 ns:
      as published   2 * 12,000,000 / 12,000 / 300,000 = 2,000 / 300,000 = 0.007 -> swap
      units right    2 * 12,000,000 / 12     / 300,000 = 2,000,000 / 300,000 = 6.7 -> recompute
    """
    bytes_per_us, bytes_per_ns, op_ns = 12e9 / 1e6, 12e9 / 1e9, 300_000
    assert 2 * MB12 / bytes_per_us / op_ns < 1
    assert 2 * MB12 / bytes_per_ns / op_ns > 1
    found = choose(Director(ALL, hidden_swap=False), chain_ns=op_ns)
    assert found == Choice(Action.RECOMPUTE, op_ns)
    # What the slip decides is what a link 1000 times as fast would make right.
    fast = LinkQueue(Link(12e12, 12e12))
    assert choose(Director(ALL, hidden_swap=False), fast, chain_ns=op_ns) == Choice(Action.SWAP, 2_000)


def test_a_busy_link_makes_swapping_dearer():
    queue = LinkQueue(PCIE)
    queue.begin_out(5 * MB12, 0)  # busy for 5 ms
    assert choose(queue=LinkQueue(PCIE), chain_ns=2_000_000).action is Action.SWAP
    assert choose(queue=queue, chain_ns=2_000_000) == Choice(Action.RECOMPUTE, 2_000_000)  # swap: 6 ms


def test_with_a_host_copy_only_the_way_back_counts():
    assert choose(chain_ns=300_000, host_whole=True) == Choice(Action.SWAP, 0)


def test_a_draw_is_recomputed():
    """Nothing moves over the link that others may need."""
    assert choose(chain_ns=1_000_000) == Choice(Action.RECOMPUTE, 1_000_000)


# -- what is possible -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("actions", "chain_ns", "swappable", "host_whole", "expected"),
    [
        (ALL, None, True, False, Action.SWAP),  # no recipe
        (ALL, 300_000, False, False, Action.RECOMPUTE),  # host full
        (ALL, 5_000_000, False, False, Action.RECOMPUTE),  # even if the chain is long
        (ALL, 5_000_000, False, True, Action.SWAP),  # host full, but it has this one already
        (ALL, None, False, False, None),
        ((Action.KEEP, Action.SWAP), 1, True, False, Action.SWAP),
        ((Action.KEEP, Action.SWAP), 1, False, False, None),
        ((Action.KEEP, Action.RECOMPUTE), 5_000_000, True, True, Action.RECOMPUTE),
        ((Action.KEEP, Action.RECOMPUTE), None, True, True, None),
        ((Action.KEEP,), 1, True, True, None),
    ],
)
def test_only_what_is_possible_and_allowed(actions, chain_ns, swappable, host_whole, expected):
    found = choose(Director(actions), chain_ns=chain_ns, swappable=swappable, host_whole=host_whole)
    assert (found and found.action) == expected


# -- rules ------------------------------------------------------------------------------------------------------------
def ruled(*rules, **changes):
    return choose(Director(ALL, [Rule(**rule) for rule in rules]), **changes)


def test_a_rule_overrides_the_costs():
    assert ruled({"op": "aten.gelu", "action": "swap"}) == Choice(Action.SWAP, 1_000_000)


def test_a_keep_rule_keeps():
    assert ruled({"op": "aten.gelu", "action": "keep"}) is None


def test_the_first_matching_rule_wins():
    rules = [
        {"op": "aten.softmax", "action": "keep"},
        {"module": "net.*", "action": "swap"},
        {"op": "aten.gelu", "action": "keep"},
    ]
    assert ruled(*rules).action is Action.SWAP
    assert ruled(*reversed(rules)) is None


def test_op_and_module_have_to_match_both():
    rule = {"op": "aten.gelu", "module": "other.*", "action": "keep"}
    assert ruled(rule).action is Action.RECOMPUTE


def test_a_rule_does_not_make_the_impossible_possible():
    assert ruled({"op": "aten.gelu", "action": "recompute"}, chain_ns=None).action is Action.SWAP
    assert ruled({"op": "aten.gelu", "action": "swap"}, swappable=False).action is Action.RECOMPUTE


def test_unknown_makers_match_only_what_matches_everything():
    assert ruled({"op": "aten.*", "action": "keep"}, op="", module="").action is Action.RECOMPUTE
    assert ruled({"op": "*", "action": "keep"}, op="", module="") is None
