"""Where a warning points."""

from collections.abc import Callable
from functools import partial

import pytest

from delta.warned import warn


def within(module: str, call: Callable[[], object]) -> Callable[[], object]:
    """`call`, by way of a line in a module of that name."""
    names = {"__name__": module, "call": call}
    exec(compile("def line(): call()", f"{module}.py", "exec"), names)
    line: Callable[[], object] = names["line"]  # type: ignore[assignment]
    return line


@pytest.mark.parametrize(
    ("modules", "where"),
    [
        ([], __file__),
        (["torch.nn.functional", "delta.runtime.hooks"], __file__),
        (["library.model", "torch", "delta"], "library.model.py"),
        (["torchvision.models", "torch.nn"], "torchvision.models.py"),
    ],
)
def test_a_warning_points_at_the_innermost_line_that_is_not_torch_s_or_delta_s(modules: list[str], where: str) -> None:
    call: Callable[[], object] = partial(warn, "a text")
    for module in reversed(modules):
        call = within(module, call)
    with pytest.warns(RuntimeWarning, match="a text") as caught:
        call()
    assert [warning.filename for warning in caught] == [where]
