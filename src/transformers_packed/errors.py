"""A common format for input errors: the expected input, the actual input, and the fix. And counts in words."""


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


def count(number: int, what: str) -> str:
    """Return a number of things in words, such as `1 step` or `2,000 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
