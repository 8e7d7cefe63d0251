"""The layer rule: `delta/` decides and is pure, `runtime/` acts, and nobody inside uses the door."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_PURE = {"delta", "delta.__main__", "delta.cli"}  # the door, lazily, and the command line
FORBIDDEN_IN_PURE = {"torch", "numpy", "threading", "time", "asyncio", "concurrent", "multiprocessing", "delta.runtime"}
RECKONING = {"delta.planner.rehearsal": {"numpy"}, "delta.planner.greedy": {"numpy"}}  # ... when planning
PROGRAMS = {
    "delta.runtime.demo_worker",
    "delta.runtime.bench.hot_path",
    "delta.runtime.script",
}  # these use Delta as anyone does
DOOR = {"delta", "delta.cli", "delta.__main__"}


def modules(directory: Path, package: str) -> Iterator[tuple[str, Path]]:
    """Dotted names and files below a directory; links to other packages are not followed."""
    for path in sorted(directory.rglob("*.py")):
        parts = path.relative_to(directory).with_suffix("").parts
        if not any((directory / Path(*parts[:n])).is_symlink() for n in range(1, len(parts))):
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


def pure_modules() -> dict[str, Path]:
    found = dict(modules(ROOT / "delta", "delta")) | dict(modules(ROOT / "policies", "delta.policies"))
    return {name: path for name, path in found.items() if name not in NOT_PURE}


def runtime_modules() -> dict[str, Path]:
    return dict(modules(ROOT / "runtime", "delta.runtime"))


def imports(name: str, source: str, is_package: bool) -> Iterator[str]:
    """Every module that the source of module `name` imports, wherever in it, in full."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")
            parents = parents[: len(parents) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(name: str, path: Path) -> set[str]:
    return set(imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py"))


def below(found: set[str], roots: set[str]) -> set[str]:
    return {name for name in found if any(name == root or name.startswith(root + ".") for root in roots)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("def f():\n    from torch import nn", {"torch", "torch.nn"}),
        ("from delta import runtime", {"delta", "delta.runtime"}),
        ("from . import x", {"delta.filter", "delta.filter.x"}),
        ("from ..runtime import x", {"delta.runtime", "delta.runtime.x"}),
    ],
)
def test_imports_are_found(source, found):
    assert set(imports("delta.filter.scores", source, is_package=False)) == found
    assert below(found, {"torch", "delta.runtime"}) == {name for name in found if "torch" in name or "runtime" in name}


def test_modules_are_found():
    assert {"delta.config", "delta.policies.loader", "delta.policies"} <= pure_modules().keys()
    assert "delta.runtime.session" in runtime_modules()
    assert not any("runtime" in name for name in pure_modules())


@pytest.mark.parametrize("name", pure_modules())
def test_decisions_are_pure(name):
    assert not below(imports_of(name, pure_modules()[name]), FORBIDDEN_IN_PURE - RECKONING.get(name, set()))


@pytest.mark.parametrize("name", sorted({*pure_modules(), *runtime_modules()} - PROGRAMS))
def test_nobody_inside_uses_the_door(name):
    path = (pure_modules() | runtime_modules())[name]
    assert not imports_of(name, path) & DOOR


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("what", [["delta"], ["delta.__main__", "delta.cli"], list(pure_modules())])
def test_importing_does_not_import_torch(what):
    done = run(f"import sys, {', '.join(what)}\nprint('torch' in sys.modules, 'delta.runtime' in sys.modules)")
    assert done.stdout.strip() == "False False", done.stderr


def test_the_door_imports_torch_only_with_what_needs_it():
    done = run(
        "import sys, delta\ndelta.policies(), delta.load_policy('delta'), delta.Policy, delta.Report\n"
        "print('torch' in sys.modules, 'delta.runtime' in sys.modules)"
    )
    assert done.stdout.strip() == "False False", done.stderr


@pytest.mark.parametrize("package", ["runtime", "policies"])
def test_the_linked_packages_have_one_name_only(package):
    done = run(f"import {package}")
    assert f"ImportError: import this package as delta.{package}, not as {package}" in done.stderr


def test_every_directory_of_modules_is_a_package():
    """Without an ``__init__.py`` a directory works in a checkout and is missing in the wheel."""
    paths = (pure_modules() | runtime_modules()).values()
    assert not [path.parent for path in paths if not (path.parent / "__init__.py").exists()]
