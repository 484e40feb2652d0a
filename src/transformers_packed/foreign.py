"""Objects of other libraries: what configurations say under private names, and other values for one call.

`models/installed.py` has the changes that stay for longer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


# The value of a name that is not there.
MISSING: Any = object()


def names_of(target: Any) -> Any:
    """Return the names of a class, or of a mapping."""
    return vars(target) if isinstance(target, type) else target


def put(target: Any, name: Any, value: Any) -> None:
    """Let a name of a class or of a mapping have this value, or remove it with [`MISSING`]."""
    if isinstance(target, type):
        if value is MISSING:
            delattr(target, name)
        else:
            setattr(target, name, value)
    elif value is MISSING:
        target.pop(name, None)
    else:
        target[name] = value


@contextmanager
def swapped(*targets: Any, **values: Any) -> Iterator[None]:
    """Let names have other values while the block runs.

    Args:
        targets (`dict` or `type`):
            The names of instances or modules, as `vars` returns them, the modules in a module, or classes. Other threads
            see the values of a module and of a class too.
        values:
            The value of each name. A name that was not there leaves with the block.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> from transformers_packed.foreign import swapped
    >>> config = SimpleNamespace(use_cache=True)
    >>> with swapped(vars(config), use_cache=False):
    ...     config.use_cache
    False
    >>> config.use_cache
    True

    ```
    """
    before = [(target, name, names_of(target).get(name, MISSING)) for target in targets for name in values]
    try:
        for target, name, _ in before:
            put(target, name, values[name])
        yield
    finally:
        for target, name, value in before:
            put(target, name, value)


def is_exporting() -> bool:
    """Whether `torch.export` traces the code that runs now.

    In torch 2.11, `torch.compiler.is_exporting` also returns `True` under `torch.compile`.
    """
    return torch.compiler._is_exporting_flag


def attention_of(config: Any) -> Any:
    """Return the attention implementation that a configuration names."""
    return getattr(config, "_attn_implementation", None)


def experts_of(config: Any) -> Any:
    """Return the implementation of experts that a configuration names."""
    return getattr(config, "_experts_implementation", None)


def set_experts(config: Any, name: str) -> None:
    """Let a configuration name another implementation of experts, which a model reads in each forward."""
    config._experts_implementation = name
