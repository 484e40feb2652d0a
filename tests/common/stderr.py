"""What a command writes to stderr by itself."""

import re


def without_torchao(stderr: str) -> str:
    """Drop torchao's lines. Transformers imports it where it is installed, and it logs about its extensions and enums."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not re.search(r"torchao|torch/utils/_pytree\.py", line, re.IGNORECASE))
