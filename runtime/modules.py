"""Which module is running: qualified names for rules and the timeline, through hooks on the user's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from delta.runtime.core import Core


class ModuleNames:
    """While entered, keeps `core.module` at the innermost named module of `model` that is in its forward."""

    def __init__(self, core: Core, model: nn.Module) -> None:
        self._core, self._model = core, model
        self._above: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> ModuleNames:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter(name)))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._core.module = ""

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._above.append(self._core.module)
            self._core.module = name

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._core.module = self._above.pop() if self._above else ""
