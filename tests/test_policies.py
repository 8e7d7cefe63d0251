import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib.resources import files

import pytest
import yaml

import delta
from delta.config import Policy
from delta.errors import PolicyError
from delta.policies import load, names, schema
from delta.runtime import session
from delta.runtime.device.cpu import CpuDevice
from delta.types import Action, Cost, Leftover

SHIPPED = [
    "delta",
    "capuchin",
    "coop",
    "delta-paper",
    "dtr",
    "keep",
    "mimose",
    "monet",
    "optimal-checkpoint",
    "recompute",
    "swap",
]


def refused(name_or_path, overrides=None):
    """The message of the error that loading gives."""
    with pytest.raises(PolicyError) as caught:
        load(name_or_path, overrides)
    return str(caught.value)


@pytest.fixture
def refused_text(tmp_path):
    """The message for a file with this content, without the file's name, which must lead each line."""

    def check(content):
        path = tmp_path / "mine.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        lines = refused(path).splitlines()
        assert all(line.startswith(str(path)) for line in lines)
        return "\n".join(line.removeprefix(str(path)) for line in lines)

    return check


def test_names_lists_what_is_shipped_default_first():
    assert names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_policy_is_complete(name):
    policy = load(name)
    assert policy.name == name
    assert policy.summary
    text = (files("delta.policies") / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("#"), "a policy begins with a comment that explains it"
    assert list(yaml.safe_load(text)) == [key for key in Policy.model_fields if key in yaml.safe_load(text)]


@pytest.mark.parametrize("name", ["delta", "delta-paper"])
def test_published_policies_cite_their_paper(name):
    assert "10.1145/3689338" in load(name).source
    assert "2203.15980" in load(name).source


def test_dtr_cites_its_paper_and_decides_as_it_does():
    """Any size may go, nothing is planned, and eager eviction: what the program is done with goes at once."""
    policy = load("dtr")
    assert "2006.09616" in policy.source
    assert (policy.filter.score, policy.filter.cost, policy.filter.min_bytes) == ("dtr", Cost.CLASSES, 0)
    assert set(policy.director.actions) == {Action.KEEP, Action.RECOMPUTE}
    assert policy.planner.kind == "none"
    assert (policy.replay.sources, policy.replay.results) == (Leftover.DROP, Leftover.HOLD)


def test_coop_cites_its_paper_and_decides_as_it_does():
    """Windows over any size, online, recompute only; convolutions and matrix products at one end."""
    policy = load("coop")
    assert "2311.00591" in policy.source
    assert (policy.filter.score, policy.filter.choose, policy.filter.min_bytes) == ("coop", "window", 0)
    assert set(policy.director.actions) == {Action.KEEP, Action.RECOMPUTE}
    assert policy.planner.kind == "none"
    dear = ["cudnn_convolution_backward", "aten.convolution", "mm", "aten.addmm", "bmm", "aten.conv2d", "aten.matmul"]
    cheap = ["relu", "aten.add", "aten._softmax", "native_layer_norm", "cudnn_batch_norm"]
    named = {op for op in (*dear, *cheap) if any(fnmatchcase(op, glob) for glob in policy.placement.left)}
    assert named == set(dear)


@pytest.mark.parametrize("score", ["dtr", "lru", "size", "delta"])
def test_windows_need_scores_that_can_be_summed(score):
    message = refused("coop", {"filter.score": score})
    assert f"filter.choose=window sums the scores of neighbours, and those of filter.score={score}" in message
    assert "set filter.score to coop, or filter.choose to one" in message


def test_mimose_cites_its_paper_and_recomputes_only():
    policy = load("mimose")
    assert "2209.02478" in policy.source
    assert set(policy.director.actions) == {Action.KEEP, Action.RECOMPUTE}
    assert policy.planner.kind == "mimose"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("planner.observe", 0, "greater than or equal to 1"),
        ("planner.rounding", "4MiB", "planner.rounding='4MiB': this is not a share. Give a share such as"),
        ("planner.rounding", "much", 'this is not a number with a unit. Give a share such as "40%".'),
        ("planner.buffer", "much", "planner.buffer"),
        ("director.actions", ["keep", "swap"], "planner.kind=mimose decides what to recompute"),
    ],
)
def test_what_mimose_cannot_do_with_is_refused(key, value, said):
    with pytest.raises(PolicyError, match=re.escape(said)):
        load("mimose", {key: value})


@pytest.mark.parametrize("cost", ["own", "ancestors", "classes", "neighbourhood"])
def test_each_cost_of_dtr_is_an_override(cost):
    assert load("dtr", {"filter.cost": cost}).filter.cost == cost


def test_defaults_are_those_of_delta_yaml():
    shipped = load("delta")
    assert Policy(name="delta", summary=shipped.summary, source=shipped.source) == shipped


def test_delta_yaml_has_every_key():
    values = yaml.safe_load((files("delta.policies") / "delta.yaml").read_text(encoding="utf-8"))
    dumped = load("delta").model_dump()
    assert values.keys() == dumped.keys()
    for section, inner in values.items():
        if isinstance(inner, dict):
            assert inner.keys() == dumped[section].keys(), section


def test_schema_json_is_the_models():
    written = json.loads((files("delta.policies") / "schema.json").read_text(encoding="utf-8"))
    assert written == json.loads(schema.text()), "regenerate it: python -m delta.policies.schema"


def test_the_schemas_defaults_make_the_default_policy():
    found = Policy.model_json_schema()
    sections = {
        key: {inner: value["default"] for inner, value in found["$defs"][model.__name__]["properties"].items()}
        for key, model in ((key, field.annotation) for key, field in Policy.model_fields.items())
        if hasattr(model, "model_fields")
    }
    assert sections["host"]["limit"] == "50%"
    assert Policy.model_validate({"name": "delta", **sections}) == Policy(name="delta")
    whole = {key: value["default"] for key, value in found["properties"].items() if key != "name"}
    assert Policy.model_validate({"name": "delta", **whole}) == Policy(name="delta")


def test_overrides():
    policy = load("delta", {"filter.min_bytes": "2MiB", "budget.strict": True, "name": "mine"})
    assert (policy.filter.min_bytes, policy.budget.strict, policy.name) == (2**21, True, "mine")
    assert policy.filter.score == "delta"
    assert load("delta") == load("delta", {}), "overrides do not stay"


def test_an_override_may_make_a_section_the_file_leaves_out():
    assert load("keep", {"filter.min_bytes": 0}).filter.min_bytes == 0


def test_a_path(tmp_path, monkeypatch):
    (tmp_path / "delta.yaml").write_text("\ufeffname: mine\nfilter: {score: lru}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path / "delta.yaml", str(tmp_path / "delta.yaml"), "delta.yaml"):
        assert load(given).filter.score == "lru"
    assert load("delta").filter.score == "delta", "a name is never a file"


def test_unknown_name():
    message = refused("detla")
    assert "policy='detla'" in message and "Did you mean 'delta'?" in message
    assert all(name in message for name in SHIPPED)
    assert "Did you mean 'dtr'?" in refused("DTR")
    assert "Did you mean" not in refused("zzz")


@pytest.mark.parametrize("given", ["missing.yaml", "missing.yml", "missing/delta", "nul\0.yaml", "."])
def test_unreadable_path(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(given if given != "." else tmp_path)
    assert message.startswith("policy=") and ("cannot read" in message)


@pytest.mark.parametrize("given", [None, 3, ["delta"]])
def test_neither_name_nor_path(given):
    assert f"policy={given!r}: give a name (delta, " in refused(given)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": holds nothing, a policy is a mapping with the keys name, summary, "),
        ("- a\n", ": holds a list, a policy is a mapping"),
        ("just words", ": holds a str, a policy is a mapping"),
        (b"name: caf\xe9\n", ": not UTF-8 text (byte 9). Save"),
        ("name: [x\n", ", line 2: expected"),
        ("name: x\0\n", ": not valid YAML"),
        ("name: 2001-99-99\n", ": not valid YAML: month"),
        ("[" * 3000, ": not valid YAML"),
        ("name: !!bool maybe\n", ": not valid YAML: 'maybe'"),
        ("name: !!int ''\n", ": not valid YAML: string index out of range"),
        ("name: !!timestamp x\n", ": not valid YAML"),
        ("name: x\nfilter: {}\nname: y\n", ", line 3: the key 'name' is given twice: keep one."),
        ("name: x\nfilter: {score: lru, score: lru}\n", ", line 2: the key 'score' is given twice"),
        ("name: x\n? [a, b]\n: 3\n", ", line 2: a key must be a word."),
        ("name: !!python/object:os.system x\n", ", line 1: could not determine a constructor"),
        ("name: x\n---\nname: y\n", ", line 2: expected a single document in the stream, but found another document."),
        ("name: x\n3: y\n", ": 3='y': unknown key. Allowed: name, summary, "),
        ("name: x\nfilter: {yes: 1}\n", ": filter.True=1: unknown key. "),
        ("{}", ": name: this key is missing, and has no default."),
        ("name: ''\n", ": name='': string should have at least 1 character."),
        ("name: x\nfilter: 3\n", ": filter=3: must be a section with the keys score, cost, choose, min_bytes."),
        ("name: x\nfilter:\n", ": filter=None: must be a section with the keys score, cost, choose, min_bytes."),
        ("name: x\nfiltr: {}\n", ": filtr={}: unknown key. Did you mean 'filter'? Allowed: name, summary, source, "),
        ("name: x\nmin_bytes: 3\n", ": min_bytes=3: unknown key. It belongs into a section: filter: {min_bytes: "),
        ("name: x\nhost.limit: 5%\n", ": host.limit='5%': unknown key. It belongs into a section: host: {limit: ...}."),
        ("name: x\nhost: {reserve: 5%}\n", ": host.reserve='5%': unknown key. It belongs into a section: budget: {"),
        ("name: x\nfilter:\n\tscore: lru\n", ", line 3: found character '\\t' that cannot start any token: YAML is"),
        ("name: x\nfilter: {scor: 1}\n", ": filter.scor=1: unknown key. Did you mean 'score'? Allowed: score, cost, c"),
        (
            "name: x\nfilter: {score: foo}\n",
            ": filter.score: no score 'foo' is registered. Give one of delta, delta-paper, ",
        ),
        ("name: x\nfilter: {cost: dear}\n", ": filter.cost='dear': input should be 'action', 'own', 'ancestors', "),
        ("name: x\nreplay: {sources: keep}\n", ": replay.sources='keep': input should be 'hold' or 'drop'"),
        ("name: x\nreplay: {result: hold}\n", ": replay.result='hold': unknown key. Did you mean 'results'?"),
        ("name: x\nfilter: {min_bytes: 8 apples}\n", ": filter.min_bytes='8 apples': the unit 'apples' is unknown."),
        ("name: x\nbudget: {reserve: 120%}\n", ": budget.reserve='120%': a share must lie between 0% and 100%."),
        ("name: x\nbudget: {strict: maybe}\n", ": budget.strict='maybe': input should be a valid boolean"),
        ("name: x\ndirector: {actions: []}\n", ": director.actions=[]: must name at least 1."),
        (
            "name: x\ndirector: {actions: swap}\n",
            ": director.actions='swap': must be a list, in brackets or with a dash",
        ),
        ("name: x\nrules: {op: aten.mm, action: keep}\n", ": must be a list, in brackets or with a dash"),
        ("name: x\ndirector: {actions: [keep, keep]}\n", ": director.actions: each action may be named once"),
        ("name: x\ndirector: {actions: [keep, compress]}\n", ": director.actions.1='compress': input should be 'keep'"),
        ("name: x\ndirector: {actions: [keep]}\n", ": planner.kind=profile has nothing to plan"),
        ("name: x\nrules: [{action: keep}]\n", ": rules.0: a rule needs `op` or `module`"),
        ("name: x\nrules: [{op: a, acton: keep}]\n", ": rules.0.acton='keep': unknown key. Did you mean 'action'?"),
        ("name: x\nrules: [3]\n", ": rules.0=3: must be a section with the keys op, module, action."),
    ],
)
def test_bad_files(refused_text, content, message):
    assert message in refused_text(content)


def test_every_mistake_has_a_line(refused_text):
    text = refused_text("filter: {score: foo, min_bytes: -1}\nbudgt: {}\n")
    assert [line.split("=")[0].split(": ")[1] for line in text.splitlines()] == [
        "name",
        "filter.score",
        "filter.min_bytes",
        "budgt",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [("filter.min_byte", "filter.min_bytes"), ("min_bytes", "filter.min_bytes"), ("strict", "budget.strict")],
)
def test_unknown_override(key, hint):
    message = refused("delta", {key: 1})
    assert message.startswith(f"override {key!r}: unknown key. Did you mean {hint!r}? Allowed: name, ")
    assert "prefetch.window" in message


@pytest.mark.parametrize("key", ["", 3, "filter.score.x"])
def test_an_override_names_a_value(key):
    assert refused("delta", {key: {}}).startswith(f"override {key!r}: unknown key.")


def test_an_override_of_a_section_says_which_values_it_has():
    message = refused("delta", {"filter": {"min_bytes": 0}})
    assert message.startswith("override 'filter': a section. Override single values of it: filter.score, filter.cost, ")


def test_a_bad_override_value_says_so():
    message = refused("delta", {"filter.min_bytes": "8 apples"})
    assert message.startswith("delta.yaml with overrides {'filter.min_bytes': '8 apples'}: filter.min_bytes='8 apples'")


@pytest.mark.parametrize("given", [["filter.min_bytes=0"], "filter.min_bytes=0", 3, {"filter.min_bytes"}])
def test_overrides_that_are_no_mapping(given):
    assert refused("delta", given) == (
        f'overrides={given!r}: give a dict of keys and values, such as {{"filter.min_bytes": 0}}.'
    )


def test_an_override_of_a_broken_section(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: x\nfilter: 3\n")
    assert "filter=3: must be a section" in refused(tmp_path / "mine.yaml", {"filter.min_bytes": 0})


@pytest.mark.parametrize("first", ["import delta", "import delta.policies", "from delta.policies import load"])
def test_delta_policies_is_package_and_function(first):
    program = f"{first}\nimport delta\nprint(delta.policies(), delta.policies.load('keep').name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{SHIPPED} keep"


@pytest.mark.parametrize(
    ("name", "activations", "asked"),
    [("recompute", "50%", False), ("swap", "50%", True), ("keep", "50%", False), ("swap", None, False)],
)
def test_the_link_is_measured_where_something_may_be_swapped(name, activations, asked, monkeypatch):
    probes, links = [], []
    real, engine = CpuDevice.bandwidth, session.Engine
    monkeypatch.setattr(CpuDevice, "bandwidth", lambda device: probes.append(1) or real(device))
    monkeypatch.setattr(CpuDevice, "interference", lambda device: 0.5)
    monkeypatch.setattr(session, "Engine", lambda *given, **more: links.append(given[2]) or engine(*given, **more))
    with delta.evict(activations=activations, policy=name, device="cpu"):
        pass
    assert bool(probes) is (links[0].interference == 0.5) is asked
