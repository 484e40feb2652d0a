"""What callbacks change in a model when training begins, after the check before the first step or around it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ...foreign import attention_of, experts_of, swapped
from ...models.untouched import HOOKS, hooks_of, records_outputs
from ..state import is_of_user


class LaterChanges:
    """What is different in a model from now on.

    A check holds for the modules of a model and for what a call of each one runs: methods of the object in place of those of
    the class, a `forward` or a call that the class has got, a compiled call, hooks, and implementations that the
    configuration names. A parametrization is another class.

    Hooks of libraries do not count. They watch, such as for metrics and logs, and must not see the rows of a check. Those
    that a forward of Transformers has registered do not count either, but stay, because it registers them once.

    Args:
        model (`torch.nn.Module`):
            The model.
    """

    def __init__(self, model: torch.nn.Module):
        self._model, self._before = model, _calls_of(model)
        self._hooks = [(x, {kind: set(vars(x)[kind]) for kind in HOOKS}) for x in model.modules()]

    def need_a_check(self) -> bool:
        """Whether a check of the model as it was does not hold for it now."""
        return _calls_of(self._model) != self._before

    @contextmanager
    def without_hooks_of_libraries(self) -> Iterator[None]:
        """Leave out those that modules have got since. A new module may need the ones that it brings."""
        with ExitStack() as stack:
            for module, before in self._hooks:
                kept = {}
                for kind, numbers in before.items():
                    now = vars(module)[kind]
                    stay = (at for at, x in now.items() if at in numbers or _counts(x) or records_outputs(x))
                    kept[kind] = type(now)((at, now[at]) for at in stay)
                stack.enter_context(swapped(vars(module), **kept))
            yield


def _calls_of(model: torch.nn.Module) -> dict[torch.nn.Module, tuple]:
    """What a call of each module runs."""
    return {module: _call_of(module) for module in model.modules()}


def _call_of(module: torch.nn.Module) -> tuple:
    state, cls, config = vars(module), type(module), vars(module).get("config")
    # A trainer may put the method of the class on the object, which changes nothing.
    calls = cls.__call__, module.forward, module._compiled_call_impl
    methods = [(name, x) for name, x in state.items() if name != "forward" and callable(x) and hasattr(cls, name)]
    inside, hooks = tuple(state["_modules"].items()), tuple(filter(_counts, hooks_of(module)))
    return cls, *calls, methods, inside, hooks, attention_of(config), experts_of(config)


def _counts(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    # An object that can be called has the module of its class. Torch prunes and normalizes weights by hooks.
    return is_of_user(hook.__module__) or hook.__module__.startswith("torch.nn.utils.")
