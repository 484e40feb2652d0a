"""Why packing leaks: the state and the convolution window of a layer, over one packed row of three documents."""

from svg import DOCUMENTS, GREEN, INK, MUTED, RED, Picture


LENGTHS = (4, 4, 4)
LEFT, STEP, BOX = 122, 41, 36
WINDOW = 4
ROW, HEIGHT = 150, 36


def main() -> None:
    picture = Picture(
        396, "Stock layers carry window and state across document boundaries; transformers_packed restarts both"
    )
    starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
    end = edge(sum(LENGTHS)) - 5

    picture.text(24, 42, "Stock layer: runs on across documents", 25, RED, font_weight="700")
    picture.text(24, 86, "state", 21, MUTED)
    picture.text(24, 126, "window", 21, MUTED)
    picture.text(24, 176, "row", 21, MUTED)
    picture.text(24, 252, "window", 21, MUTED)
    picture.text(24, 292, "state", 21, MUTED)

    for start in starts[1:]:
        x = edge(start) - 2.5
        picture.line(x, 64, x, 312, INK, 2.5, stroke_dasharray="6 5")

    # Stock: one state for the whole row, and a window that reaches back over the boundary.
    picture.arrow(edge(0), 79, edge(starts[1]) - 12, MUTED)
    picture.arrow(edge(starts[1]) - 12, 79, edge(starts[2]) - 12, RED)
    picture.arrow(edge(starts[2]) - 12, 79, end, RED)
    for start in starts:
        last = start + 2
        first = max(last - WINDOW, 0)
        picture.rect(edge(first), 112, edge(last) - edge(first) - 5, 14, RED if start else MUTED, 7)

    for n, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        for token in range(start, start + length):
            picture.rect(edge(token), ROW, BOX, HEIGHT, DOCUMENTS[n])
        middle = (edge(start) + edge(start + length) - 5) / 2
        picture.text(middle, 211, f"document {n + 1}", 21, DOCUMENTS[n], text_anchor="middle", font_weight="600")
        # Ours: both begin with the document.
        picture.rect(edge(start), 238, edge(start + 2) - edge(start) - 5, 14, GREEN, 7)
        picture.circle(edge(start) + 8, 285, 8, GREEN)
        picture.arrow(edge(start) + 8, 285, edge(start + length) - 8, GREEN)

    picture.text(24, 350, "This package: restarts in each document", 25, GREEN, font_weight="700")
    picture.text(24, 378, "Window: drawn at the second token of each document", 19, MUTED)
    picture.write(__file__)


def edge(token: int) -> float:
    """The left edge of a token's box."""
    return LEFT + token * STEP


if __name__ == "__main__":
    main()
