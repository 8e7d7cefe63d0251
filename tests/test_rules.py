"""Rules: what is impossible binds no plan, what matches nothing is told, and modules need a model."""

from __future__ import annotations

import re
from copy import deepcopy

import pytest
import torch
from builders import a_log, a_policy, an_op
from exactly import numbers_of, trained
from inside import different
from torch import Tensor, nn
from typer.testing import CliRunner

import delta
from delta.budget import Budget
from delta.cli import app
from delta.errors import PolicyError
from delta.learner import Learner
from delta.planner import PLANNERS, Plan, StepGraph, Task
from delta.planner.steplog import build_graph
from delta.planning import Planning
from delta.report import Report
from delta.revising import Revising
from delta.types import Action, Encoding, Kind, Link
from delta.units import Bytes

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
KEEP, SWAP, RECOMPUTE, ENCODE = Action.KEEP, Action.SWAP, Action.RECOMPUTE, Action.ENCODE


# -- in plans ---------------------------------------------------------------------------------------------------------
def chain() -> StepGraph:
    """Six storages of 100 bytes, made one from the other; the first cannot be replayed, the fifth has an encoded form.
    Backward needs the last first."""
    count = 6
    ops = [an_op(10 + k, [k], [k + 1], cost_ns=10 + k, replayable=k > 0) for k in range(count)]
    log = a_log(
        ops,
        dict.fromkeys(range(count + 1), 100),
        saves=[(k + 1, 100 * (k + 1), k + 1) for k in range(count)],
        needs=[(count - 1 - p, 1000 + 100 * p) for p in range(count)],
        releases=[(count - 1 - p, p + 1) for p in range(count)],
        end_ns=2000,
        kinds={0: Kind.SOURCE},
    )
    log.encodings[5] = Encoding(10, 1, 1)
    return build_graph(log, 0)


def planned(kind: str, actions: list[Action], forced: dict[int, Action], limit_bytes: int = 250) -> Plan:
    policy = a_policy(director={"actions": actions}, planner={"kind": kind})
    planning = Planning(policy, Budget(activations=Bytes(limit_bytes)), Link(1e9, 1e9), announced=False)
    planning.learner = Learner(Revising(0, planning.plan))
    return planning.plan(chain(), limit_bytes, forced)


KINDS = ["profile", "monet", "optimal-checkpoint", "capuchin", "mimose"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("actions", "impossible"),
    [
        ([KEEP, RECOMPUTE, ENCODE], {2: ENCODE, 3: ENCODE}),  # no encoded form
        ([KEEP, RECOMPUTE], {1: SWAP, 2: SWAP}),  # no link, so that nothing is swapped
        ([KEEP, RECOMPUTE, SWAP], {0: RECOMPUTE}),  # no recipe
    ],
    ids=["encode", "swap", "recompute"],
)
def test_what_cannot_go_as_a_rule_says_is_planned_as_if_there_were_none(kind, actions, impossible):
    assert planned(kind, actions, impossible) == planned(kind, actions, {})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_possible_is_obeyed_beside_what_is_not(kind):
    actions = planned(kind, [KEEP, RECOMPUTE, ENCODE], {1: KEEP, 2: ENCODE, 3: RECOMPUTE}, 350).actions
    assert actions[1] is KEEP
    assert actions[2] is not ENCODE
    assert actions[3] in (KEEP, RECOMPUTE)


@pytest.mark.parametrize("kind", ["profile", "monet", "optimal-checkpoint"])
def test_an_encoded_form_is_taken_where_a_rule_says_so(kind):
    assert planned(kind, [KEEP, RECOMPUTE, ENCODE], {4: ENCODE}, 150).actions[4] is ENCODE


# -- in a training ----------------------------------------------------------------------------------------------------
class Dropping(nn.Module):
    """Saves what `native_dropout` makes, all of it: the mask, and the result for the layer that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.native_dropout(self.body(x), 0.3, True)[0])


def losses_of(model: nn.Module) -> list[Tensor]:
    return numbers_of(lambda: trained(model, lambda: model(torch.randn(64, 32)).square().mean()))


def under(*rules: dict[str, str], named: bool = False, share: str | None = "50%") -> Report:
    """A training under these rules, whose numbers are those of a plain one. `named`: Delta is given the model."""
    changes = {"filter.min_bytes": 0, "director.actions": ["keep", "recompute", "encode"], "rules": list(rules)}
    policy, model = delta.load_policy("delta", changes), Dropping()
    plain = losses_of(deepcopy(model))
    with delta.evict(model if named else None, activations=share, policy=policy, device="cpu") as run:
        evicted = losses_of(model)
    assert different(plain, evicted) == []
    return run.report()


def told(report: Report) -> str:
    """The one warning of rules that match nothing; empty if there is none."""
    found = [text for text in report.warnings if "matched nothing" in text]
    assert len(found) <= 1
    return "".join(found)


@pytest.fixture
def plans(monkeypatch):
    """Every task of the planner, and its plan."""
    found: list[tuple[Task, Plan]] = []
    planner = PLANNERS["profile"]

    def noted(task: Task) -> Plan:
        found.append((task, planner(task)))
        return found[-1][1]

    monkeypatch.setitem(PLANNERS, "profile", noted)
    return found


def made_by(task: Task, op: str) -> list[int]:
    """Save orders of what ops of that name have made."""
    graph = task.graph
    makers = [graph.nodes[node].op for node in graph.saved]
    return [order for order, maker in enumerate(makers) if maker is not None and graph.ops[maker].name == op]


def test_a_plan_obeys_a_rule_for_the_mask_and_not_for_the_result(plans):
    """Both are made by the op of the rule; the result has no smaller form, and goes as if there were none."""
    assert told(under({"op": "aten.native_dropout", "action": "encode"}, share="0%")) == ""
    assert plans
    for task, plan in plans:
        nodes = [task.graph.nodes[node] for node in task.graph.saved]
        result, mask = sorted(made_by(task, "aten.native_dropout"), key=lambda order: nodes[order].encoded_bytes)
        assert (nodes[result].encoded_bytes, task.forced) == (0, {mask: ENCODE})
        assert (plan.actions[result], plan.actions[mask]) == (RECOMPUTE, ENCODE)


def test_a_plan_keeps_what_a_rule_keeps(plans):
    under({"op": "aten.native_dropout", "action": "keep"})
    assert plans
    for task, plan in plans:
        kept = made_by(task, "aten.native_dropout")
        assert task.forced == dict.fromkeys(kept, KEEP) and len(kept) == 2
        assert {plan.actions[order] for order in kept} == {KEEP}


@pytest.mark.filterwarnings("ignore:rules:RuntimeWarning")
def test_a_rule_that_matches_nothing_is_told_once_with_the_nearest_names():
    text = told(under({"op": "aten.tanh", "action": "keep"}, {"op": "aten.native_dropuot.default", "action": "encode"}))
    assert text.startswith(
        "rules.1 (op='aten.native_dropuot.default', action=encode) matched nothing that 4 whole steps saved; "
        "the nearest names of ops: aten.native_dropout, "
    )
    assert "rules.0" not in text
    assert "without the overload" in text


@pytest.mark.filterwarnings("ignore:rules:RuntimeWarning")
def test_a_module_that_no_rule_can_mean_is_told():
    text = told(under({"module": "boddy.*", "action": "keep"}, {"module": "head", "action": "keep"}, named=True))
    assert text.startswith("rules.0 (module='boddy.*', action=keep) matched nothing")
    assert "the nearest names of modules: body.2, body.1, head. Ops" in text


def test_a_rule_for_a_kind_of_step_that_comes_later_matches():
    nets = [nn.Sequential(nn.Linear(16, 16), act(), nn.Linear(16, 16)) for act in (nn.GELU, nn.Tanh)]
    policy = delta.load_policy("delta", {"filter.min_bytes": 0, "rules": [{"op": "aten.tanh", "action": "keep"}]})
    with delta.evict(activations="50%", policy=policy, device="cpu") as run:
        for _ in range(4):
            for net in nets:
                net(torch.randn(8, 16)).square().sum().backward()
    assert told(run.report()) == ""


def test_rules_that_match_are_told_of_in_no_way():
    """A rule that comes too late to count has a name that is there."""
    keep = {"action": "keep"}
    assert (
        told(under({"op": "aten.*"} | keep, {"op": "aten.tanh"} | keep, {"module": "body.1"} | keep, named=True)) == ""
    )


@pytest.mark.filterwarnings("error")
def test_a_step_that_was_not_seen_tells_nothing():
    """Without a budget no op is recorded, and no rule has anything to decide."""
    assert told(under({"op": "aten.no_such_op", "action": "keep"}, share=None)) == ""


# -- modules ----------------------------------------------------------------------------------------------------------
def test_a_rule_for_modules_needs_the_model():
    rules = [{"op": "aten.tanh", "action": "keep"}, {"op": "aten.gelu", "module": "body.*", "action": "keep"}]
    policy = delta.load_policy("delta", {"rules": rules})
    said = (
        "policy delta: rules.1.module='body.*' is a glob over the names of the model's modules, and no model was given"
    )
    with pytest.raises(PolicyError, match=re.escape(said)):
        delta.evict(activations="50%", policy=policy)
    delta.evict(Dropping(), activations="50%", policy=policy)


def test_deltactl_says_that_it_has_no_model(tmp_path):
    script, policy = tmp_path / "train.py", tmp_path / "mine.yaml"
    script.write_text("print('ran')\n")
    policy.write_text('name: mine\nrules: [{module: "body.*", action: keep}]\n')
    done = CliRunner().invoke(app, ["run", "--policy", str(policy), str(script)])
    assert done.exit_code == 2
    assert "deltactl cannot give the model of a script" in done.output
    assert "ran" not in done.stdout
