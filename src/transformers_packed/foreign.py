"""Objects of other libraries: what configurations say under private names, and other values for one call.

`models/installed.py` has the changes that stay for longer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


_MISSING = object()


@contextmanager
def swapped(names: dict[str, Any], /, **values: Any) -> Iterator[None]:
    """Let names have other values while the block runs.

    Args:
        names (`dict`):
            The names of an instance or a module, as `vars` returns them, or the modules in a module. Other threads see
            the values of a module too.
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
    before = {name: names.get(name, _MISSING) for name in values}
    names.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                del names[name]
            else:
                names[name] = value


def attention_of(config: Any) -> Any:
    """Return the attention implementation that a configuration names."""
    return getattr(config, "_attn_implementation", None)


def experts_of(config: Any) -> Any:
    """Return the implementation of experts that a configuration names."""
    return getattr(config, "_experts_implementation", None)


def set_experts(config: Any, name: str) -> None:
    """Let a configuration name another implementation of experts, which a model reads in each forward."""
    config._experts_implementation = name
