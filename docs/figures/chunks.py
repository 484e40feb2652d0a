"""The gated delta rule in chunks of 64 tokens, over two documents of a packed row."""

from svg import DOCUMENTS, GREEN, INK, MUTED, Picture


CHUNK = 64
LENGTHS = (150, 100)
SCALE = 1.1875  # of a full chunk: its square is 76 wide
GAP, MARGIN = 28, 52
TOP = 142


def main() -> None:
    picture = Picture(
        352, "Chunks of 64 tokens: masked products inside, a state from chunk to chunk, zero at each document's start"
    )
    picture.caption(
        f"The gated delta rule in chunks of {CHUNK} tokens",
        "Each document of a packed row starts with a state of zero",
    )
    x = MARGIN
    for n, length in enumerate(LENGTHS):
        color = DOCUMENTS[n]
        if n:
            boundary = x - GAP / 2 + 6
            picture.line(boundary, 98, boundary, 258, INK, 2.5, stroke_dasharray="6 5")
            x += 44
        start = x
        picture.text(x - 40, TOP + 49, "0", 24, GREEN, font_weight="700")
        picture.arrow(x - 24, TOP + 41, x - 3, GREEN, 4, 7)
        for first in range(0, length, CHUNK):
            tokens = min(CHUNK, length - first)
            side = CHUNK * SCALE
            if first:
                picture.arrow(x - GAP + 3, TOP + 41, x - 3, GREEN, 4, 7)
                picture.text(x - GAP / 2, TOP + 24, "S", 21, GREEN, text_anchor="middle", font_weight="700")
            draw_chunk(picture, x, side, tokens, color)
            picture.text(x + side / 2, TOP + side + 28, str(tokens), 20, MUTED, text_anchor="middle")
            x += side + GAP
        middle = (start + x - GAP) / 2
        words = f"document {n + 1} ({length})"
        picture.text(middle, 122, words, 20, color, text_anchor="middle", font_weight="600")
    legend(picture)
    picture.write(__file__)


def draw_chunk(picture: Picture, x: float, side: float, tokens: int, color: str) -> None:
    """A chunk's square of token pairs: the lower triangle counts, and nothing of the padding."""
    used = tokens * SCALE
    picture.rect(x, TOP, side, side, "#f6f8fa", 2, stroke="#d1d9e0", stroke_width=1.5)
    picture.polygon([(x, TOP), (x, TOP + used), (x + used, TOP + used)], color)


def legend(picture: Picture) -> None:
    picture.polygon([(26, 292), (26, 312), (46, 312)], DOCUMENTS[0])
    picture.text(60, 310, "in a chunk: products of token pairs, masked", 20)
    picture.arrow(24, 333, 50, GREEN, 4, 7)
    picture.text(60, 340, "between chunks: the state S, one after the other", 20)


if __name__ == "__main__":
    main()
