"""Scores and planners of a program's own: the worked example of the page, and what cannot be registered."""

import re
from pathlib import Path

import pytest
from logs import random_net
from models import CASES, train
from toy import Toy

import delta
from delta import parts
from delta.errors import BudgetError, PolicyError
from delta.filter import SCORES
from delta.planner import PLANNERS
from delta.simulate.simulation import simulate
from delta.trace import read
from delta.types import Link
from delta.units import Share

PAGE = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def registered_here(monkeypatch):
    """What a test registers is gone after it."""
    for name in ("_scores", "_planners"):
        monkeypatch.setattr(parts, name, dict(getattr(parts, name)))
    scores, planners = dict(SCORES), dict(PLANNERS)
    yield
    for known, before in ((SCORES, scores), (PLANNERS, planners)):
        known.clear()
        known.update(before)


@pytest.fixture
def example(tmp_path):
    """The example as the page has it: its Python is run, its YAML is a file."""
    text = PAGE.partition("\n## A part of your own\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```(python|yaml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for code in (content for language, content in found if language == "python"):
        exec(compile("import delta\n" + code, "docs/policies.md", "exec"), {"__name__": "example"})
    (yaml,) = (content for language, content in found if language == "yaml")
    (tmp_path / "every-third.yaml").write_text(yaml, encoding="utf-8")
    return tmp_path / "every-third.yaml"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_the_example_trains_to_the_same_bits(name, example):
    policy = delta.load_policy(example, {"filter.min_bytes": 0})
    with delta.evict(activations="60%", policy=policy) as run:
        evicted = train(CASES[name], 3)
    assert train(CASES[name], 3).differences(evicted) == []
    assert run.report().modes["planned"] == 2
    assert run.report().evictions["recompute"] > 0


def test_the_example_plays_traces_where_everything_may_go(example, tmp_path):
    trace = read(random_net(30, seed=1).write(tmp_path / "net.log"))
    run = simulate(trace, delta.load_policy(example, {"filter.min_bytes": 0}), Share(0.7))
    assert run.status == "ok"
    assert run.policy == "every-third"
    assert run.recomputed_ns > 0


def test_the_score_of_the_example_ranks(example, tmp_path):
    trace = read(random_net(30, seed=1).write(tmp_path / "net.log"))
    own = delta.load_policy("dtr", {"filter.score": "density", "filter.cost": "own"})
    known = delta.load_policy("dtr", {"filter.score": "msps", "filter.cost": "own"})
    runs = [simulate(trace, policy, Share(0.7)) for policy in (own, known)]
    assert runs[0].recomputed_ns == runs[1].recomputed_ns > 0, "msps without ancestors is the same formula"


def fails(task):
    raise ZeroDivisionError("of the planner's own")


def answers_none(task):
    return None


@pytest.mark.parametrize(
    ("planner", "error", "told"),
    [
        (fails, ZeroDivisionError, "of the planner's own"),
        (answers_none, PolicyError, r"planner 'mine' answered None: a planner makes a delta\.planner\.Plan"),
    ],
)
def test_a_planner_that_fails_is_told_where_the_program_saves(planner, error, told, tmp_path):
    delta.register_planner("mine", planner)
    policy = delta.Policy(name="x", filter={"min_bytes": 0}, planner={"kind": "mine"})
    with pytest.raises(error, match=told), delta.evict(activations="60%", policy=policy) as run:
        train(CASES["gpt"], 3)
    assert run.report().plans == {"made": 1}  # in the second step it was told, and not asked again
    with pytest.raises(error, match=told):
        simulate(read(random_net(30, seed=1).write(tmp_path / "net.log")), policy, Share(0.7), Link(1e9, 1e9))


def test_a_planner_that_fails_hides_no_limit_that_was_missed():
    """Of the step in which both come the budget is told; the planner is asked again at the end of the next."""
    delta.register_planner("fails", lambda task: 1 // 0)
    toy = Toy(50, planner={"kind": "fails"}, budget={"strict": True})
    toy.source(0, 10)
    toy.op(1, 100, [0])
    toy.save(1, 1)
    toy.use(1, 5)
    with pytest.raises(BudgetError, match="50 B"):
        toy.engine.raise_failed()


def test_a_name_is_known_only_once_it_is_registered():
    with pytest.raises(PolicyError, match="no score 'mine' is registered"):
        delta.load_policy("dtr", {"filter.score": "mine"})
    delta.register_score("mine", lambda candidate: -candidate.nbytes)
    assert delta.load_policy("dtr", {"filter.score": "mine"}).filter.score == "mine"
    with pytest.raises(PolicyError, match="no planner 'mine' is registered"):
        delta.load_policy("delta", {"planner.kind": "mine"})


@pytest.mark.parametrize(
    ("register", "name", "part", "said"),
    [
        (delta.register_score, "lru", len, "'lru' is a shipped score"),
        (delta.register_planner, "none", len, "'none' is a shipped planner"),
        (delta.register_score, "", len, "the name of a score must be a non-empty string, not ''"),
        (delta.register_planner, 3, len, "the name of a planner must be a non-empty string, not 3"),
        (delta.register_score, "mine", 3, "the score 'mine' has to be callable, 3 is not"),
    ],
)
def test_what_cannot_be_registered(register, name, part, said):
    with pytest.raises(PolicyError, match=re.escape(said)):
        register(name, part)


def test_the_shipped_names_are_all_there_is():
    assert set(parts.SHIPPED_SCORES) == set(SCORES)
    assert set(parts.SHIPPED_PLANNERS) == {*PLANNERS, "none"}
