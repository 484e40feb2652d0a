"""The figure of [`AuditReport.plot`]: the influence between documents as heat maps with a shared logarithmic scale."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

from ..errors import input_error
from .report import AuditReport, SourceResult


SMALLEST = 1e-8
_COLORS = {"isolated": "#1b7837", "leaks": "#b2182b", "refused": "#666666"}
_ROWS = {"influence": ("forward", "changed document"), "backward": ("backward", "document that receives the gradient")}


def draw(path: str | Path, reports: list[AuditReport], titles: Sequence[str] | None) -> None:
    """Draw one column per report and source, with forward above backward."""
    if find_spec("matplotlib") is None:
        raise ImportError('plot needs matplotlib: pip install "transformers_packed[demo]"')
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    names = [report.model.rpartition(".")[2] for report in reports] if titles is None else list(titles)
    if len(names) != len(reports):
        raise input_error(f"{len(reports)} titles, one per report", len(names))
    pairs = zip(names, reports, strict=True)
    columns = [(name, report, *item) for name, report in pairs for item in report.sources.items()]
    rows = [row for row in _ROWS if any(getattr(result, row) for *_, result in columns)] or ["influence"]
    size = max(3.0, 0.42 * max(len(report.lengths) for report in reports))
    figsize = (1.8 + (size + 0.9) * len(columns), 0.9 + (size + 1.0) * len(rows))
    figure = Figure(figsize=figsize, layout="constrained", dpi=150)
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    norm, image = LogNorm(SMALLEST, 1), None
    for x, (name, report, source, result) in enumerate(columns):
        for y, row in enumerate(rows):
            axes = grid[y][x]
            if y == 0:
                title = f"{name}\n{source}: {result.verdict}"
                axes.set_title(title, fontsize=10, weight="bold", color=_COLORS[result.verdict])
            image = _heat_map(axes, report, result, row, norm, first=x == 0) or image
    if image is not None:
        bar = figure.colorbar(image, ax=grid, shrink=0.7, extend="both", aspect=30)
        bar.set_label("largest relative change of a token (white: exactly 0)", fontsize=9)
    figure.savefig(path)


def _heat_map(axes, report: AuditReport, result: SourceResult, row: str, norm, *, first: bool):
    import numpy as np
    from matplotlib.patches import Rectangle

    direction, changed = _ROWS[row]
    values = getattr(result, row)
    if values is None:
        axes.set(xticks=[], yticks=[], facecolor="#f4f4f4", box_aspect=1, xlabel=f"{direction}: not measured")
        axes.xaxis.label.set_size(8)
        axes.spines[:].set_color("#cccccc")
        if result.reason and row == "influence":
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
        axes.set_ylabel(f"tokens of the {changed}", fontsize=8)
    return image
