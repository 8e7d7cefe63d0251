import pytest
from pydantic import ValidationError

from delta.config import (
    BudgetConfig,
    DirectorConfig,
    FilterConfig,
    HostConfig,
    PlannerConfig,
    Policy,
    PrefetchConfig,
    ReplayConfig,
    Rule,
)
from delta.errors import PolicyError
from delta.types import Action, Cost, Leftover
from delta.units import Bytes, Share


def test_only_the_name_is_required():
    assert {name for name, field in Policy.model_fields.items() if field.is_required()} == {"name"}
    assert Policy(name="mine").name == "mine"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "name: this key is missing, and has no default."),
        ({"name": "x", "filtr": {}}, "filtr={}: unknown key. Did you mean 'filter'? Allowed: name, summary, "),
        (
            {"name": "x", "filter": {"scor": 1}},
            "filter.scor=1: unknown key. Did you mean 'score'? Allowed: ",
        ),
        (
            {"name": "x", "filter": {"min_bytes": "8 apples"}},
            "filter.min_bytes='8 apples': the unit 'apples'",
        ),
        ({"name": "x", "filter": {3: 4}}, "filter.3=3: keys should be strings."),
        ({"name": "x", "filter": "lru"}, "filter='lru': must be a section with the keys score, cost, "),
        ({"name": "x", "rules": [{"action": "keep"}]}, "rules.0: a rule needs `op` or `module`"),
    ],
)
def test_a_policy_made_in_python_is_refused_in_the_words_of_its_keys(values, told):
    with pytest.raises(PolicyError) as caught:
        Policy(**values)
    assert str(caught.value).startswith(told)


def test_every_mistake_of_a_policy_made_in_python_has_a_line():
    with pytest.raises(PolicyError) as caught:
        Policy(filter={"score": "foo", "min_bytes": -1})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "name",
        "filter.score",
        "filter.min_bytes=-1",
    ]


def test_a_policy_is_frozen_and_hashable():
    policy = Policy(name="mine", rules=({"op": "aten.mm", "action": "keep"},))
    with pytest.raises(PolicyError, match=r"name='other': a policy cannot be changed. Make another: delta.load_policy"):
        policy.name = "other"
    with pytest.raises(PolicyError, match="min_bytes=3: a policy cannot be changed"):
        policy.filter.min_bytes = 3
    assert hash(policy) == hash(policy.model_copy())


@pytest.mark.parametrize(("given", "nbytes"), [(0, 0), (4096, 4096), ("1MiB", 2**20), ("2 kB", 2000)])
def test_min_bytes(given, nbytes):
    assert FilterConfig(min_bytes=given).min_bytes == nbytes


@pytest.mark.parametrize(("given", "window"), [("auto", "auto"), (0, 0), ("256MiB", 2**28)])
def test_window(given, window):
    assert PrefetchConfig(window=given).window == window


def test_window_offers_auto_in_its_message():
    with pytest.raises(ValidationError, match=r"window='soon': this is not a number.*Or give \"auto\""):
        PrefetchConfig(window="soon")


@pytest.mark.parametrize("given", ["-1MiB", "5%", "8 apples", -1, 1.5, None, True])
@pytest.mark.parametrize("model", [FilterConfig, PrefetchConfig])
def test_numbers_of_bytes_refused(model, given):
    (field,) = {"min_bytes", "window"} & model.model_fields.keys()
    with pytest.raises(ValidationError, match=field):
        model.model_validate({field: given})


def test_sizes_that_may_be_shares():
    assert HostConfig(limit="50%").limit == Share(0.5)
    assert HostConfig(limit="4GiB").limit == Bytes(4 * 2**30)
    assert BudgetConfig(reserve=0).reserve == Bytes(0)
    assert BudgetConfig(reserve=Share(0.1)).reserve == Share(0.1)
    with pytest.raises(ValidationError, match="reserve='120%'"):
        BudgetConfig(reserve="120%")


def test_spill_dir_takes_a_path(tmp_path):
    assert HostConfig(spill_dir=tmp_path).spill_dir == str(tmp_path)


@pytest.mark.parametrize("actions", [["keep"], ["swap", "keep"], ["recompute"], ["keep", "encode"]])
def test_actions(actions):
    assert DirectorConfig(actions=actions).actions == tuple(Action(action) for action in actions)


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        ([], "at least 1"),
        (["keep", "keep"], "keep is there more often"),
        (["compress"], "'keep', 'swap', 'recompute' or 'encode'"),
    ],
)
def test_actions_refused(actions, why):
    with pytest.raises(ValidationError, match=why):
        DirectorConfig(actions=actions)


@pytest.mark.parametrize("cost", Cost)
def test_costs(cost):
    assert FilterConfig(cost=cost.value).cost is cost


def test_by_default_a_score_counts_what_the_action_costs():
    assert FilterConfig().cost is Cost.ACTION


def test_what_is_kept_for_replays():
    assert ReplayConfig() == ReplayConfig(sources="hold", results="drop")
    assert ReplayConfig(sources="drop").sources is Leftover.DROP


@pytest.mark.parametrize(
    ("model", "field"), [(FilterConfig, "cost"), (ReplayConfig, "sources"), (ReplayConfig, "results")]
)
def test_unknown_words_refused(model, field):
    with pytest.raises(ValidationError, match=f"{field}\n *Input should be '"):
        model.model_validate({field: "other"})


@pytest.mark.parametrize("field", ["observe", "time_limit_s", "gap"])
@pytest.mark.parametrize("given", [True, "1"])
def test_a_number_is_given_as_one(field, given):
    with pytest.raises(ValidationError, match=f"{field}\n *Input should be a valid "):
        PlannerConfig.model_validate({field: given})


def test_a_planner_needs_something_to_plan():
    with pytest.raises(PolicyError, match=r"planner\.kind=profile has nothing to plan"):
        Policy(name="mine", director={"actions": ["keep"]})
    assert Policy(name="mine", director={"actions": ["keep"]}, planner={"kind": "none"})
    assert Policy(name="mine", director={"actions": ["swap"]})


@pytest.mark.parametrize(
    ("kind", "actions", "ways"),
    [
        ("mimose", ["keep", "swap", "encode"], "recompute"),
        ("optimal-checkpoint", ["keep", "swap"], "recompute"),
        ("capuchin", ["keep", "encode"], "swap or recompute"),
    ],
)
def test_a_planner_needs_an_action_that_it_plans(kind, actions, ways):
    told = rf"planner\.kind={kind} decides what to {ways}, .* not allow that: .* or add {ways} to director\.actions"
    with pytest.raises(PolicyError, match=told):
        Policy(name="mine", director={"actions": actions}, planner={"kind": kind})
    for way in ways.split(" or "):
        assert Policy(name="mine", director={"actions": [*actions, way]}, planner={"kind": kind})


def test_a_rule_may_only_ask_for_what_the_director_may_do():
    with pytest.raises(PolicyError, match=r"rules\.1\.action=swap is not among director\.actions \(recompute\)"):
        Policy(
            name="mine",
            director={"actions": ["recompute"]},
            rules=({"op": "a", "action": "recompute"}, {"op": "b", "action": "swap"}),
        )


def test_a_rule_may_always_keep():
    policy = Policy(name="mine", director={"actions": ["swap"]}, rules=({"op": "a", "action": "keep"},))
    assert policy.rule_for("a") is Action.KEEP


def test_a_rule_needs_a_pattern():
    with pytest.raises(ValidationError, match="needs `op` or `module`"):
        Rule(action="keep")


@pytest.mark.parametrize(
    ("op", "module", "action"),
    [
        ("aten._softmax.default", "", Action.RECOMPUTE),
        ("aten._softmax.default", "net.head", Action.RECOMPUTE),  # the first match wins
        ("aten.mm.default", "net.head", Action.KEEP),
        ("aten.mm.default", "net.body", None),
        ("aten.mm.default", "", None),
        ("ATEN._softmax.default", "", None),  # case matters on every system
        ("aten.add.Tensor", "net.body.add", Action.SWAP),
        ("aten.add.Tensor", "net.body", None),  # both globs must fit
    ],
)
def test_the_first_rule_that_matches(op, module, action):
    policy = Policy(
        name="mine",
        rules=(
            {"op": "aten._softmax*", "action": "recompute"},
            {"module": "*.head", "action": "keep"},
            {"op": "aten.add*", "module": "*.add", "action": "swap"},
        ),
    )
    assert policy.rule_for(op, module) is action


def test_writing_and_reading_gives_the_same_policy():
    policy = Policy(
        name="mine",
        host={"limit": "3GiB", "spill_dir": "/somewhere"},
        budget={"reserve": "7.5%", "strict": True},
        rules=({"op": "aten.mm*", "action": "swap"},),
    )
    assert Policy.model_validate(policy.model_dump(mode="json")) == policy
    assert Policy.model_validate_json(policy.model_dump_json()) == policy
