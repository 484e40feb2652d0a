"""The results of an audit: an [`AuditReport`] as an object, a table, JSON or a figure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import input_error


# From the source with the most information about the documents to the one with the least.
SOURCES = ("all", "cu_seq_lens", "seq_idx", "position_ids")
_COLUMNS = {"forward": "influence", "backward": "backward", "alone": "alone"}


@dataclass(frozen=True)
class Leak:
    """A leak between two documents, or a document whose results differ from those in a separate row.

    Attributes:
        source (`str`): the boundaries that the model received.
        direction (`str`): `"forward"` (logits), `"backward"` (gradients), or `"alone"` (logits differ from those of
            the same document in a separate row, although no other document changes them).
        from_document (`int`, *optional*): the changed document, or the document whose embeddings receive a gradient.
            `None` for `"alone"`.
        to_document (`int`): the document whose logits are measured.
        size (`float`): the largest relative change of a token or, for `"backward"`, its largest relative gradient.
        threshold (`float`): the largest size that counts as noise.
        module (`str`, *optional*): the first module that leaks, determined for one leak of each source and direction.
        module_class (`str`, *optional*): the class of that module.
        kind (`str`, *optional*): `"attention"`, `"convolution"`, `"state"`, `"boundary"` (a document cut in the wrong
            place), `"positions"` (documents do not affect one another but differ from separate rows),
            `"backward only"` or `"other"`. A leaking state hides a leaking convolution earlier in the same module.
    """

    source: str
    direction: str
    from_document: int | None
    to_document: int
    size: float
    threshold: float
    module: str | None = None
    module_class: str | None = None
    kind: str | None = None

    def __str__(self) -> str:
        pair = f"document {self.to_document} differs from the same document run alone"
        if self.from_document is not None:
            verb = "changes" if self.direction == "forward" else "receives gradients from"
            pair = f"document {self.from_document} {verb} document {self.to_document}"
        where = f", in {self.module} ({self.module_class}): {self.kind}" if self.module is not None else ""
        return f"{self.source} {self.direction}: {pair} by {self.size:.1e} (at most {self.threshold:.1e}){where}"


@dataclass
class SourceResult:
    """The results for one source of boundaries. Documents are counted from 0.

    Attributes:
        verdict (`str`): `"isolated"`, `"leaks"` or `"refused"`.
        reason (`str`, *optional*): the reason for a refusal.
        influence (`list[list[float]]`): at `[i][j]` the largest relative change of a token's logits in document `j`
            when document `i` changes.
        alone (`list[float]`): the largest relative change of a token's logits between each document in the row and in
            a separate row.
        backward (`list[list[float]]`, *optional*): at `[i][j]` the largest gradient of document `j`'s logits at a
            token of document `i`, relative to the largest gradient at its own tokens.
        thresholds (`dict[str, float]`): the noise threshold of each direction.
    """

    verdict: str
    reason: str | None = None
    influence: list[list[float]] | None = None
    alone: list[float] | None = None
    backward: list[list[float]] | None = None
    thresholds: dict[str, float] = field(default_factory=dict)

    def worst(self, direction: str) -> float | None:
        """Return the largest value of a direction, excluding the influence of documents on themselves."""
        values = getattr(self, _COLUMNS[direction])
        if values is None:
            return None
        if direction == "alone":
            return max(values)
        return max(x for i, row in enumerate(values) for j, x in enumerate(row) if i != j)

    def cell(self, direction: str) -> str:
        """Format the largest value of a direction and its noise threshold for the table."""
        worst = self.worst(direction)
        if worst is None:
            return "-"
        return f"{f'{worst:.1e}' if worst else 0} ({self.thresholds[direction]:.0e})"


@dataclass
class AuditReport:
    """The result of [`audit_model`].

    Attributes:
        model (`str`): the package and class of the model.
        settings (`dict`): dtype, device, attention implementation, versions, seed.
        lengths (`list[int]`): the length in tokens of each document in the row.
        sources (`dict[str, SourceResult]`): the verdict and the measurements for each source of boundaries.
        leaks (`list[Leak]`): every pair of documents above the threshold, sorted by decreasing size.
        notes (`list[str]`): changes that the audit made to the model while it ran, and steps that failed.
    """

    model: str
    settings: dict[str, str | int]
    lengths: list[int]
    sources: dict[str, SourceResult]
    leaks: list[Leak]
    notes: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether the model rejects every source of boundaries, so that nothing was measured."""
        return all(result.verdict == "refused" for result in self.sources.values())

    @property
    def ok(self) -> bool:
        """Whether packing is safe with the boundaries that the collator can return.

        This requires the verdict `"isolated"` for `"all"`. If the model rejects `"all"` or was audited without it,
        every source that it accepts must be isolated, and it must accept at least one.
        """
        accepted = {name: result.verdict for name, result in self.sources.items() if result.verdict != "refused"}
        if "all" in accepted:
            return accepted["all"] == "isolated"
        return bool(accepted) and set(accepted.values()) == {"isolated"}

    def table(self) -> str:
        """Format the report as plain text: the verdict and the largest values per source, then the leaks.

        `forward` is the largest relative change of a token's logits when another document changes. `backward` is the
        largest gradient at a token of another document, relative to the largest at the document's own tokens. `alone`
        is the largest relative change of a token's logits between a document in the row and in a separate row. The
        noise thresholds are in parentheses.
        """
        settings = (f"{name} {value}" if name == "seed" else str(value) for name, value in self.settings.items())
        lines = [f"{self.model}: {', '.join(settings)}"]
        lines += [f"documents 0 to {len(self.lengths) - 1} of {', '.join(map(str, self.lengths))} tokens", ""]
        rows, refused, found = [("boundaries", "verdict", *_COLUMNS)], [], []
        for name, result in self.sources.items():
            rows.append((name, result.verdict, *map(result.cell, _COLUMNS)))
            if result.verdict == "refused":
                refused.append(f"{name}: {result.reason}")
            for direction in _COLUMNS:
                leaks = [leak for leak in self.leaks if (leak.source, leak.direction) == (name, direction)]
                if leaks:
                    shown = next((leak for leak in leaks if leak.module is not None), leaks[0])
                    found.append(f"{shown}{f'  ({len(leaks)} such)' if len(leaks) > 1 else ''}")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for title, items in (("refused", refused), ("leaks", found), ("notes", self.notes)):
            if items:
                lines += ["", title, *(f"  {item}" for item in items)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Convert the report to JSON text, which [`AuditReport.from_json`] reads."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "AuditReport":
        """Load a report from the text of [`AuditReport.to_json`].

        Raises:
            `ValueError`: the text is not the JSON of a report.
        """
        try:
            fields = json.loads(text)
            fields.pop("ok")
            fields["sources"] = {name: SourceResult(**result) for name, result in fields["sources"].items()}
            fields["leaks"] = [Leak(**leak) for leak in fields["leaks"]]
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise input_error("the text returned by AuditReport.to_json", f"other text ({error})") from None

    def plot(self, path: str | Path, *others: "AuditReport", titles: Sequence[str] | None = None) -> None:
        """Draw the influence matrices as heat maps, for example to compare reports before and after patching.

        Args:
            path (`str` or `Path`):
                The image file to write. Its suffix determines the format.
            others (`AuditReport`):
                More reports, drawn to the right of this one.
            titles (`Sequence[str]`, *optional*):
                A title for each report. Defaults to the class of its model.

        Raises:
            `ImportError`: matplotlib is not installed.
            `ValueError`: the number of titles differs from the number of reports.
        """
        from .plot import draw

        draw(path, [self, *others], titles)
