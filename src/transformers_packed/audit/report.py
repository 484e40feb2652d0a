"""The results of an audit: an [`AuditReport`] as an object, a table, JSON or a figure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

from ..errors import input_error


# From the source with the most information about the documents to the one with the least.
SOURCES = ("all", "cu_seq_lens", "seq_idx", "position_ids")
_COLUMNS = {"forward": "influence", "backward": "backward", "alone": "alone"}
# The figure: the smallest value of its logarithmic scale, the colors of verdicts, and the axis of each direction.
_SMALLEST = 1e-8
_COLORS = {"isolated": "#1b7837", "leaks": "#b2182b", "refused": "#666666"}
_AXES = {"forward": "changed document", "backward": "document that receives the gradient"}


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

    @property
    def pair(self) -> tuple[int | None, int]:
        """`from_document` and `to_document`."""
        return self.from_document, self.to_document

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
class Placement:
    """The differences between documents in one place and the same documents alone in a row.

    Attributes:
        name (`str`): the place.
        hidden_states (`list[float]`): the largest absolute difference of the last hidden states of each document.
        logps (`list[float]`): the largest absolute difference of the log-probabilities of each document's own next tokens.
            0 for a document of one token. Empty if the model has no logits.
        reason (`str`, *optional*): why a document was not measured.
        other_sums (`bool`): whether another order of sums belongs to the place, as in a tree of documents. Differences
            are then no failure.
    """

    name: str
    hidden_states: list[float] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    reason: str | None = None
    other_sums: bool = False

    @property
    def worst(self) -> float:
        """The largest difference of any document."""
        return max([*self.hidden_states, *self.logps], default=0.0)


@dataclass
class Operation:
    """An operation with equal inputs and other results at the tokens of a document.

    Attributes:
        name (`str`): the operator of PyTorch or the op of this package, `"A in B"` for an operator inside an op. If an
            operator with another name ran for the document alone, it follows in parentheses.
        calls (`int`): the number of calls with other results.
        size (`float`): the largest absolute difference of the results.
    """

    name: str
    calls: int = 0
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.calls} calls, by up to {self.size:.1e}"


@dataclass
class Invariance:
    """Whether documents have the same bits wherever they stand.

    Attributes:
        placements (`list[Placement]`): the differences in each place.
        worst (`str`, *optional*): the name of the place with the largest difference, without those with other sums.
        document (`int`, *optional*): the document with the largest difference there.
        operations (`list[Operation]`): the operations that bring the differences there, in the order of their first
            calls.
        remainder (`float`, *optional*): the largest difference there once the results of all `operations` are those of
            the document alone. 0 if they explain everything.
    """

    placements: list[Placement]
    worst: str | None = None
    document: int | None = None
    operations: list[Operation] = field(default_factory=list)
    remainder: float | None = None

    @property
    def refused(self) -> bool:
        """Whether no document was measured in a place other than alone."""
        return not any(place.hidden_states for place in self.placements[1:])

    @property
    def ok(self) -> bool:
        """Whether every difference is exactly 0, in all places that the model accepts, without those with other sums."""
        return not self.refused and not any(place.worst for place in self.placements if not place.other_sums)

    def lines(self) -> list[str]:
        """Format the differences as plain text, and the operations that bring them."""
        rows: list[tuple[str, ...]] = [("placement", "hidden states", "logps")]
        for place in self.placements:
            sizes = (place.hidden_states, place.logps)
            rows.append((place.name, *("-" if not x else f"{max(x):.1e}" if max(x) else "0" for x in sizes)))
        lines = _aligned(rows)
        other = [place.name for place in self.placements if place.other_sums]
        lines += ["", f"other sums, so differences are expected: {', '.join(other)}"] if other else []
        if self.worst is not None:
            lines += ["", f"operations that bring them in {self.worst}, document {self.document}"]
            lines += [f"  {operation}" for operation in self.operations]
            if self.remainder != 0:
                rest = "not measured" if self.remainder is None else f"a difference of {self.remainder:.1e}"
                lines.append(f"  others, which were not found: {rest}")
        return lines


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


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
        invariance ([`Invariance`], *optional*): the differences of documents in other places. `sources` and `leaks` are
            then empty, because leaks were not measured.
    """

    model: str
    settings: dict[str, str | int]
    lengths: list[int]
    sources: dict[str, SourceResult]
    leaks: list[Leak]
    notes: list[str] = field(default_factory=list)
    invariance: Invariance | None = None

    @property
    def refusals(self) -> dict[str, str]:
        """The reason why something was not measured, by the source of boundaries or the placement."""
        refused = {name: str(x.reason) for name, x in self.sources.items() if x.verdict == "refused"}
        places = self.invariance.placements if self.invariance else ()
        return refused | {place.name: place.reason for place in places if place.reason}

    @property
    def refused(self) -> bool:
        """Whether the model rejects every source of boundaries, or every placement, so that nothing was measured."""
        if self.invariance is not None:
            return self.invariance.refused
        return all(result.verdict == "refused" for result in self.sources.values())

    @property
    def ok(self) -> bool:
        """Whether packing is safe with the boundaries that the collator can return.

        This requires the verdict `"isolated"` for `"all"`. If the model rejects `"all"` or was audited without it,
        every source that it accepts must be isolated, and it must accept at least one.

        In a report of `invariance` it is [`Invariance.ok`] instead, which says nothing about leaks.
        """
        if self.invariance is not None:
            return self.invariance.ok
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

        For `invariance`, the largest differences per placement, then the operations that bring them.
        """
        settings = (f"{name} {value}" if name == "seed" else str(value) for name, value in self.settings.items())
        lines = [f"{self.model}: {', '.join(settings)}"]
        lines += [f"documents 0 to {len(self.lengths) - 1} of {', '.join(map(str, self.lengths))} tokens", ""]
        if self.invariance is not None:
            lines += self.invariance.lines()
        else:
            rows = [("boundaries", "verdict", *_COLUMNS)]
            rows += [(name, x.verdict, *map(x.cell, _COLUMNS)) for name, x in self.sources.items()]
            lines += _aligned(rows)
        refused = [f"{name}: {reason}" for name, reason in self.refusals.items()]
        for title, items in (("refused", refused), ("leaks", self._leaks_in_words()), ("notes", self.notes)):
            if items:
                lines += ["", title, *(f"  {item}" for item in items)]
        return "\n".join(lines)

    def _leaks_in_words(self) -> list[str]:
        """One leak for each source and direction, and the number of all."""
        lines = []
        for key in product(self.sources, _COLUMNS):
            leaks = [leak for leak in self.leaks if (leak.source, leak.direction) == key]
            if leaks:
                shown = next((leak for leak in leaks if leak.module is not None), leaks[0])
                lines.append(f"{shown}{f'  ({len(leaks)} such)' if len(leaks) > 1 else ''}")
        return lines

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
            if fields["invariance"] is not None:
                found = fields["invariance"]
                found["placements"] = [Placement(**place) for place in found["placements"]]
                found["operations"] = [Operation(**operation) for operation in found["operations"]]
                fields["invariance"] = Invariance(**found)
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
            `ValueError`: a report of `invariance`, which has no such matrices, or the number of titles differs from the
                number of reports.
        """
        if find_spec("matplotlib") is None:
            raise ImportError("plot needs matplotlib: pip install matplotlib")
        reports = [self, *others]
        if any(report.invariance for report in reports):
            raise input_error("reports of leaks", "a report of invariance", "Print its table instead.")
        names = [report.model.rpartition(".")[2] for report in reports] if titles is None else list(titles)
        if len(names) != len(reports):
            raise input_error(f"{len(reports)} titles, one per report", len(names))
        pairs = zip(names, reports, strict=True)
        columns = [
            (f"{name}\n{x}: {y.verdict}", report, y) for name, report in pairs for x, y in report.sources.items()
        ]
        _draw(path, columns)


def _draw(path: str | Path, columns: list[tuple[str, AuditReport, SourceResult]]) -> None:
    """Draw each result with its title, with forward above backward."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    results = [result for *_, result in columns]
    rows = ["forward", "backward"] if any(result.backward for result in results) else ["forward"]
    size = max(3.0, 0.42 * max(len(report.lengths) for _, report, _ in columns))
    figsize = (1.8 + (size + 0.9) * len(columns), 0.9 + (size + 1.0) * len(rows))
    figure = Figure(figsize=figsize, layout="constrained", dpi=150)
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    norm, image = LogNorm(_SMALLEST, 1), None
    for x, (title, report, result) in enumerate(columns):
        grid[0][x].set_title(title, fontsize=10, weight="bold", color=_COLORS[result.verdict])
        for y, direction in enumerate(rows):
            image = _heat_map(grid[y][x], report, result, direction, norm, first=x == 0) or image
    if image is not None:
        bar = figure.colorbar(image, ax=grid, shrink=0.7, extend="both", aspect=30)
        bar.set_label("largest relative change of a token (white: exactly 0)", fontsize=9)
    figure.savefig(path)


def _heat_map(axes: Any, report: AuditReport, result: SourceResult, direction: str, norm: Any, *, first: bool):
    import numpy as np
    from matplotlib.patches import Rectangle

    values = getattr(result, _COLUMNS[direction])
    if values is None:
        axes.set(xticks=[], yticks=[], facecolor="#f4f4f4", box_aspect=1, xlabel=f"{direction}: not measured")
        axes.xaxis.label.set_size(8)
        axes.spines[:].set_color("#cccccc")
        if result.reason and direction == "forward":
            text = fill(result.reason, 38, max_lines=12)
            axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=8, transform=axes.transAxes)
        return None
    matrix = np.array(values)
    other = np.where(np.eye(len(matrix), dtype=bool) | (matrix == 0), np.nan, matrix)
    image = axes.imshow(other, cmap="YlOrRd", norm=norm)
    threshold = result.thresholds[direction]
    for i in range(len(matrix)):
        axes.add_patch(Rectangle((i - 0.5, i - 0.5), 1, 1, color="#d9d9d9", linewidth=0))
        for j in range(len(matrix)):
            if i != j and matrix[i, j] > threshold:
                dark = matrix[i, j] > 1e-3
                text = f"{matrix[i, j]:.2f}" if matrix[i, j] >= 0.01 else f"{matrix[i, j]:.0e}".replace("e-0", "e-")
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color="white" if dark else "black")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(len(matrix)), report.lengths, fontsize=8)
        axis.set_ticks(np.arange(len(matrix)) - 0.5, minor=True)
    axes.grid(which="minor", color="#eeeeee", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    worst = result.worst(direction)
    summary = "exactly 0 everywhere" if worst == 0 else f"largest {worst:.1e}, noise up to {threshold:.0e}"
    axes.set_xlabel(f"tokens of the measured document\n{direction}: {summary}", fontsize=8)
    if first:
        axes.set_ylabel(f"tokens of the {_AXES[direction]}", fontsize=8)
    return image
