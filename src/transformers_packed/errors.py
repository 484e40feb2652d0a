"""One form for every complaint about an input: the call, what it expected, what it got, and what to do."""


def input_error(call: str, *, expected: str, got: str, fix: str) -> ValueError:
    """Build the `ValueError` that the package raises for unsupported or inconsistent input.

    Example:

    ```python
    >>> from transformers_packed.errors import input_error
    >>> print(input_error("pack", expected="a tensor", got="a list", fix="Stack it first."))
    pack: expected a tensor, got a list. Stack it first.

    ```
    """
    return ValueError(f"{call}: expected {expected}, got {got}. {fix}")
