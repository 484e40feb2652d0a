"""The support matrix: what the audit measured for every causal type of Transformers, as data and as a page.

`models/support_matrix.json` is written by `transformers-packed audit --all --json`, the page from it.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import input_error
from ..models.verdict import SUPPORT_MATRIX


# What the page shows of an entry: the model, what it is told of the documents, and the title of the column.
COLUMNS = {
    ("builtin", "position_ids"): "built-in, `position_ids`",
    ("builtin", "all"): "built-in, all",
    ("ours", "position_ids"): "`patch_model`, `position_ids`",
    ("ours", "all"): "`patch_model`, all",
}
VERDICTS = ("isolated", "isolated by unpacking", "leaks", "refused", "not built")
_INTRODUCTION = """# Which models keep packed documents apart?

Measured by `transformers-packed audit --all --output {output}` with {versions}, in float32 on a CPU, where the kernels
of other packages cannot run.

Every type in Transformers' causal language model mapping was built tiny, with random weights and each of its kinds of
layers, and given one row of five documents. Then each document was changed in turn. `position_ids` are ids that restart
in every document; *all* adds `seq_idx`, `cu_seq_lens_q`, `cu_seq_lens_k` and the maximum lengths, as the collator gives
them with every flag set. *built-in* is Transformers' class as it is, *`patch_model`* what this package makes of it.

* **isolated**: logits and gradients of a document depend on no other one, and are those of the document by itself;
* **isolated by unpacking**: the same, as the model runs its documents one by one;
* **leaks**: they are not. The first module that leaks is named, and how: through `attention`, a `convolution` or a
  `state`; `boundary` is a document cut in the wrong place, `positions` one that no other one touches and that yet
  differs from itself alone;
* **refused**: an error stops the model, or the model is not causal, so that packing has no meaning for it;
* **not built**: no tiny model of the type could be built.

"""


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

    def verdict(self, model_type: str, model: str, source: str) -> str:
        """One of `VERDICTS`, for `"builtin"` or `"ours"`."""
        entry = self.types[model_type]
        return "not built" if "not_built" in entry else entry[model][source]["verdict"]

    def counts(self) -> dict[tuple[str, str], Counter]:
        """For each of `COLUMNS` how many types have which verdict."""
        return {column: Counter(self.verdict(name, *column) for name in self.types) for column in COLUMNS}

    def to_json(self) -> str:
        """JSON with a line for each type."""
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in self.types.items())
        head = f'{{\n "transformers": {json.dumps(self.transformers)},\n "torch": {json.dumps(self.torch)},\n'
        return f'{head} "types": {{\n{lines}\n }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> "SupportMatrix":
        """The matrix that [`SupportMatrix.to_json`] wrote.

        Raises:
            `ValueError`: the text is not such a matrix.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise input_error(
                "the text that SupportMatrix.to_json returned",
                f"something else ({error})",
                "Write it with transformers-packed audit --all --json.",
            ) from None

    def to_markdown(self, output: str = "docs/support_matrix.md") -> str:
        """The page; `output` is its name in the command that it mentions."""
        versions = f"transformers {self.transformers} and torch {self.torch}"
        counts = self.counts()
        lines = [
            _INTRODUCTION.format(output=output, versions=versions)
            + _row(f"{len(self.types)} types", *COLUMNS.values()),
            "|---|" + "---:|" * len(COLUMNS),
            *(_row(verdict, *(counts[column][verdict] or "" for column in COLUMNS)) for verdict in VERDICTS),
            "",
            _row("type", "class", *COLUMNS.values(), "why"),
            "|---" * (len(COLUMNS) + 3) + "|",
        ]
        for name, entry in sorted(self.types.items()):
            if "not_built" in entry:
                lines.append(_row(f"`{name}`", "", *["not built"] * len(COLUMNS), entry["not_built"]))
                continue
            found = [entry[model][source] for model, source in COLUMNS]
            reasons = dict.fromkeys(one["reason"] for one in found if "reason" in one)
            lines.append(_row(f"`{name}`", f"`{entry['class']}`", *map(_cell, found), "; ".join(reasons)))
        return "\n".join(lines) + "\n"


@cache
def load_support_matrix() -> SupportMatrix:
    """The matrix that comes with the package."""
    return SupportMatrix.from_json(SUPPORT_MATRIX.read_text(encoding="utf-8"))


def _cell(found: dict[str, str]) -> str:
    leak = f": `{found['module']}` ({found['kind']})" if found["verdict"] == "leaks" else ""
    return found["verdict"] + leak


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
