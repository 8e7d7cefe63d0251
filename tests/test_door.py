import importlib.metadata
import subprocess
import sys

import pytest

import delta

ERRORS = {
    "BudgetError",
    "DeltaError",
    "HostFullError",
    "NestedSessionError",
    "PlotError",
    "PolicyError",
    "RecomputeMismatchError",
    "StorageModifiedError",
    "SwapError",
    "TimelineError",
    "TraceError",
}
NAMES = {
    "evict",
    "load_policy",
    "policies",
    "Policy",
    "register_planner",
    "register_score",
    "Report",
    "__version__",
} | ERRORS


def test_exported_names():
    assert set(delta.__all__) == NAMES
    assert dir(delta) == delta.__all__ == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there(name):
    assert getattr(delta, name) is not None


@pytest.mark.parametrize(
    ("name", "module"),
    [("evict", "delta.runtime.session"), ("Policy", "delta.config"), ("Report", "delta.report")],
)
def test_where_the_lazy_names_come_from(name, module):
    assert getattr(delta, name) is getattr(sys.modules[module], name)


def test_star_import():
    program = "from delta import *\nprint(load_policy('keep').name, policies()[0], evict.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["keep", "delta", "evict"]


def test_load_policy():
    assert delta.load_policy("keep") == delta.policies.load("keep")
    assert delta.load_policy("delta", overrides={"filter.min_bytes": 0}).filter.min_bytes == 0
    assert isinstance(delta.load_policy("keep"), delta.Policy)


def test_unknown_attribute():
    with pytest.raises(AttributeError, match=r"module 'delta' has no attribute 'evcit'; it has .*evict"):
        _ = delta.evcit


def test_version_is_the_distributions():
    try:
        installed = importlib.metadata.version("delta-evict")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from a checkout that is not installed")
    assert delta.__version__ == installed
