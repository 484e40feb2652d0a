"""What an audit found: an [`AuditReport`], as an object, a table, JSON or a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import input_error


# From the source that says most about the documents to the one that says least.
SOURCES = ("all", "cu_seq_lens", "seq_idx", "position_ids")
_COLUMNS = {"forward": "influence", "backward": "backward", "alone": "alone"}


@dataclass(frozen=True)
class Leak:
    """One document that another one changes, or that differs from itself alone.

    Attributes:
        source (`str`): which boundaries the model was given.
        direction (`str`): `"forward"` (logits), `"backward"` (gradients), or `"alone"` (logits differ from the same
            document's alone although no other document changes them).
        from_document (`int`, *optional*): the document that is changed, or whose embeddings get a gradient. `None`
            for `"alone"`.
        to_document (`int`): the document whose logits are looked at.
        size (`float`): the largest relative change of a token.
        threshold (`float`): what the size may be.
        module (`str`, *optional*): the first module that leaks. Looked for in one leak of each source and direction.
        module_class (`str`, *optional*): its class.
        kind (`str`, *optional*): `"attention"`, `"convolution"`, `"state"`, `"boundary"` (a document cut in
            the wrong place), `"positions"` (documents do not touch one another and yet differ from themselves alone),
            `"backward only"` or `"other"`. A state that leaks hides whether a convolution before it in the same module
            does.
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
        pair = f"document {self.to_document} differs from itself alone"
        if self.from_document is not None:
            verb = "changes" if self.direction == "forward" else "gets gradients from"
            pair = f"document {self.from_document} {verb} document {self.to_document}"
        where = f", in {self.module} ({self.module_class}): {self.kind}" if self.module is not None else ""
        return f"{self.source} {self.direction}: {pair} by {self.size:.1e} (at most {self.threshold:.1e}){where}"


@dataclass
class SourceResult:
    """What one source of boundaries gave; document numbers are indices.

    Attributes:
        verdict (`str`): `"isolated"`, `"leaks"` or `"refused"`.
        reason (`str`, *optional*): why it was refused.
        influence (`list[list[float]]`): at `[i][j]` the largest relative change of a token's logits in document `j`
            when document `i` changes.
        alone (`list[float]`): the same between each document in the row and alone.
        backward (`list[list[float]]`, *optional*): at `[i][j]` the largest gradient of document `j`'s logits at a
            token of document `i`, relative to the largest at its own tokens.
        thresholds (`dict[str, float]`): what is taken for noise, by direction.
    """

    verdict: str
    reason: str | None = None
    influence: list[list[float]] | None = None
    alone: list[float] | None = None
    backward: list[list[float]] | None = None
    thresholds: dict[str, float] = field(default_factory=dict)

    def worst(self, direction: str) -> float | None:
        """The largest figure of a direction, documents' influence on themselves left out."""
        values = getattr(self, _COLUMNS[direction])
        if values is None:
            return None
        if direction == "alone":
            return max(values)
        return max(x for i, row in enumerate(values) for j, x in enumerate(row) if i != j)

    def cell(self, direction: str) -> str:
        """The largest figure of a direction and what is taken for noise, as the table has it."""
        worst = self.worst(direction)
        if worst is None:
            return "-"
        return f"{f'{worst:.1e}' if worst else 0} ({self.thresholds[direction]:.0e})"


@dataclass
class AuditReport:
    """The result of [`audit_model`].

    Attributes:
        model (`str`): the model's class with its package.
        settings (`dict`): dtype, device, attention implementation, versions, seed.
        lengths (`list[int]`): the documents of the row, in tokens.
        sources (`dict[str, SourceResult]`): verdict and figures for each source of boundaries.
        leaks (`list[Leak]`): every pair of documents above the threshold, the largest first.
        notes (`list[str]`): what the audit changed about the model while it ran, and what it could not do.
    """

    model: str
    settings: dict[str, str | int]
    lengths: list[int]
    sources: dict[str, SourceResult]
    leaks: list[Leak]
    notes: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether the model takes no source of boundaries at all, so that nothing could be measured."""
        return all(result.verdict == "refused" for result in self.sources.values())

    @property
    def ok(self) -> bool:
        """Whether packing is safe with everything that the collator can give.

        That is: documents are isolated with `"all"`, if the model was audited with it and accepts it; otherwise with
        each source that it accepts, and there is one.
        """
        accepted = {name: result.verdict for name, result in self.sources.items() if result.verdict != "refused"}
        if "all" in accepted:
            return accepted["all"] == "isolated"
        return bool(accepted) and set(accepted.values()) == {"isolated"}

    def table(self) -> str:
        """Plain text: a verdict and the largest figures per source, then what leaks where.

        `forward` is the largest relative change of a token's logits when another document changes, `backward` the
        largest gradient that reaches another document, `alone` the largest difference between a document in the row
        and alone. In brackets stands what is taken for noise.
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
        """The report as JSON text; [`AuditReport.from_json`] reads it back."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "AuditReport":
        """The report that [`AuditReport.to_json`] wrote.

        Raises:
            `ValueError`: the text is not such a report.
        """
        try:
            fields = json.loads(text)
            fields.pop("ok")
            fields["sources"] = {name: SourceResult(**result) for name, result in fields["sources"].items()}
            fields["leaks"] = [Leak(**leak) for leak in fields["leaks"]]
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise input_error("the text that AuditReport.to_json returned", f"something else ({error})") from None

    def plot(self, path: str | Path, *others: "AuditReport", titles: Sequence[str] | None = None) -> None:
        """Draw the influence matrices as heat maps, those of `others` beside this report's: before and after.

        Args:
            path (`str` or `Path`):
                The picture; its suffix gives the format.
            others (`AuditReport`):
                Further reports, drawn to the right.
            titles (`Sequence[str]`, *optional*):
                A name for each report, by default the model's class.

        Raises:
            `ImportError`: matplotlib is missing.
        """
        from .plot import draw

        draw(path, [self, *others], titles)
