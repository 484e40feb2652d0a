"""One form for every complaint about an input: what was expected, what came, and what to do."""


def input_error(expected: object, got: object, fix: str = "", *, option: str = "") -> ValueError:
    """Build the `ValueError` that the package raises for unsupported or inconsistent input.

    The traceback names the call; a command, which prints no traceback, gives its `option` instead.

    Example:

    ```python
    >>> from transformers_packed.errors import input_error
    >>> print(input_error("a tensor", "a list", "Stack it first."))
    expected a tensor, got a list. Stack it first.

    ```
    """
    return ValueError(f"{option and f'{option}: '}expected {expected}, got {got}. {fix}".rstrip())
