"""The support matrix: what the audit measured for every causal type of Transformers.

`support_matrix.json` beside this file is written by `utils/audit_all.py`, which describes it.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import input_error


PATH = Path(__file__).with_name("support_matrix.json")


@dataclass(frozen=True)
class SupportMatrix:
    """Verdicts for model types.

    Attributes:
        transformers (`str`): the version of Transformers that was audited.
        torch (`str`): the version of torch.
        types (`dict[str, dict]`): by model type an entry: `not_built`, a reason, or else `class`, `attention` (the
            implementation that ran), and under `builtin` and `ours` a verdict by source of boundaries. That has
            `verdict`, and `module` and `kind` of what leaks or the `reason`.
    """

    transformers: str
    torch: str
    types: dict[str, dict[str, Any]]

    @classmethod
    def from_json(cls, text: str) -> "SupportMatrix":
        """The matrix in this text; a `ValueError` if there is none."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise input_error("the support matrix that utils/audit_all.py wrote", error) from None


@cache
def load_support_matrix() -> SupportMatrix:
    """The matrix that comes with the package."""
    return SupportMatrix.from_json(PATH.read_text(encoding="utf-8"))
