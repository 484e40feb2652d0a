"""A common format for input errors: the expected input, the actual input, and the fix. And counts in words."""

from collections.abc import Iterable, Sequence
from typing import Any


# A condition, what is expected, what came if it holds, and the fix. Or the error of another check, if there is one.
Rule = tuple[Any, str, Any, str] | ValueError | None


def input_error(expected: object, got: object, fix: str = "", *, option: str = "") -> ValueError:
    """Build the `ValueError` that the package raises for unsupported or inconsistent input.

    The traceback names the call. Commands print no traceback, so they pass their `option` to name it in the message.

    Example:

    ```python
    >>> from transformers_packed.errors import input_error
    >>> print(input_error("a tensor", "a list", "Stack it first."))
    expected a tensor, got a list. Stack it first.

    ```
    """
    return ValueError(f"{option and f'{option}: '}expected {expected}, got {got}. {fix}".rstrip())


def shapes(*tensors: Any) -> str:
    """Return the shapes of tensors in words, `none` for those that are `None`."""
    return alternatives(["none" if x is None else str(tuple(x.shape)) for x in tensors], "and")


def first_error(rules: Iterable[Rule]) -> ValueError | None:
    """Return the error of the first rule that applies.

    Example:

    ```python
    >>> from transformers_packed.errors import first_error
    >>> print(first_error([(False, "a list", "a tensor", ""), (True, "rows", "none", "Add some.")]))
    expected rows, got none. Add some.

    ```
    """
    for rule in rules:
        if isinstance(rule, tuple):
            applies, *words = rule
            rule = input_error(*words) if applies else None
        if rule is not None:
            return rule
    return None


def check_rules(rules: Iterable[Rule]) -> None:
    """Raise the error of the first rule that applies, if one does.

    Example:

    ```python
    >>> from transformers_packed.errors import check_rules
    >>> check_rules([(False, "a list", "a tensor", "")])

    ```
    """
    if (error := first_error(rules)) is not None:
        raise error


def unsupported(where: str, what: str, fix: str = "") -> ValueError:
    """Build the `ValueError` for what does not work together, although neither is malformed.

    Example:

    ```python
    >>> from transformers_packed.errors import unsupported
    >>> print(unsupported("a packed row", "a cache", "Leave it out."))
    a packed row does not support a cache. Leave it out.

    ```
    """
    return ValueError(f"{where} does not support {what}. {fix}".rstrip())


def described(error: BaseException) -> str:
    """Return the type and the message of an error without its full stop, as a part of a sentence.

    PyTorch's message on memory goes on with sizes and advice. Only its first sentence stays.

    Example:

    ```python
    >>> from transformers_packed.errors import described
    >>> described(KeyError("score"))
    "KeyError: 'score'"

    ```
    """
    message = str(error)
    if is_out_of_memory(error):
        message = message.partition(". ")[0]
    return f"{type(error).__name__}: {message}".rstrip(": .\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is PyTorch's error on the memory of a GPU, whose class needs an import of torch."""
    return type(error).__name__ == "OutOfMemoryError"


def alternatives(words: Sequence[str], last_by: str = "or") -> str:
    """Return words as in `A, B or C`, with `last_by` before the last one."""
    *others, last = words
    return f"{', '.join(others)} {last_by} {last}" if others else last


def count(number: int, what: str) -> str:
    """Return a number of things in words, such as `1 step` or `2,000 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
