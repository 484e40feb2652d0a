"""Hooks that callbacks add to modules when training begins, after the check before the first step or around it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ...foreign import swapped
from ...models.untouched import HOOKS
from ..state import is_of_user


class LaterHooks:
    """The hooks that modules get from now on.

    Those of the user's code may change what is computed, so the check needs them. Those of libraries watch, such as for
    metrics and logs, and must not see its rows.

    Args:
        model (`torch.nn.Module`):
            The model.
    """

    def __init__(self, model: torch.nn.Module):
        self._before = [(x, {kind: set(vars(x)[kind]) for kind in HOOKS}) for x in model.modules()]

    def are_of_user(self) -> bool:
        """Whether any of them are of the user's code."""
        return any(
            number not in numbers and _is_of_user(hook)
            for module, before in self._before
            for kind, numbers in before.items()
            for number, hook in vars(module)[kind].items()
        )

    @contextmanager
    def without_those_of_libraries(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, before in self._before:
                kept = {}
                for kind, numbers in before.items():
                    now = vars(module)[kind]
                    kept[kind] = type(now)((at, x) for at, x in now.items() if at in numbers or _is_of_user(x))
                stack.enter_context(swapped(vars(module), **kept))
            yield


def _is_of_user(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    # An object that can be called has the module of its class.
    return is_of_user(hook.__module__)
