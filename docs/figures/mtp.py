"""The head of multi-token prediction over a packed row of two documents: what each of its rows reads and predicts."""

from svg import DOCUMENTS, GREEN, INK, MUTED, Picture


# The letter and the tokens of each document.
ROW = (("a", 5), ("b", 4))
LEFT, STEP, BOX, HEIGHT = 144, 53, 48, 38
TINTS = ("#d6e4f7", "#f6dfc6")
NOTHING = "#eef1f4"
TOKENS, STATES, NEXT, LAYER, TARGETS = 96, 160, 206, 266, 326
# The column that is outlined, from 0.
EXAMPLE = 0


def main() -> None:
    picture = Picture(
        454,
        "Each row of the head reads the hidden state of a token and the embedding of the next one, and predicts the token "
        "after it; the last two rows of a document have no target",
    )
    picture.caption(
        "Multi-token prediction in a packed row", "The head predicts two tokens ahead, never across documents"
    )
    tracks = (TOKENS, "tokens"), (STATES, "state"), (NEXT, "next token"), (LAYER, "head"), (TARGETS, "predicts")
    for y, words in tracks:
        picture.text(24, y + 26, words, 19, MUTED)
    first = 0
    for number, (letter, length) in enumerate(ROW):
        draw_document(picture, number, letter, first, length)
        first += length
    x = edge(ROW[0][1]) - (STEP - BOX) / 2
    picture.line(x, TOKENS - 8, x, TARGETS + HEIGHT + 8, INK, 2.5, stroke_dasharray="6 5")
    top, left = STATES - 6, edge(EXAMPLE) - 5
    picture.rect(left, top, BOX + 10, TARGETS + HEIGHT + 6 - top, "none", 8, stroke=GREEN, stroke_width=3)
    letter = ROW[0][0]
    words = f"reads h{EXAMPLE + 1} and {letter}{EXAMPLE + 2}, predicts {letter}{EXAMPLE + 3}"
    picture.text(24, 406, f"One row of the head: {words}", 20, GREEN, font_weight="600")
    picture.text(24, 434, "A document's last two rows have no target.", 20, MUTED)
    picture.write(__file__)


def draw_document(picture: Picture, number: int, letter: str, first: int, length: int) -> None:
    """The columns of a document, from token to target."""
    for token in range(length):
        x = edge(first + token)
        block(picture, x, TOKENS, DOCUMENTS[number], f"{letter}{token + 1}", "#ffffff")
        block(picture, x, STATES, TINTS[number], f"h{token + 1}", INK)
        # Nothing is read or predicted across the end.
        following, target = f"{letter}{token + 2}", f"{letter}{token + 3}"
        if token + 1 < length:
            block(picture, x, NEXT, TINTS[number], following, INK)
        else:
            block(picture, x, NEXT, NOTHING, "0", MUTED)
        if token + 2 < length:
            block(picture, x, TARGETS, DOCUMENTS[number], target, "#ffffff")
        else:
            block(picture, x, TARGETS, NOTHING, "–", MUTED)
    width = length * STEP - (STEP - BOX)
    picture.rect(edge(first), LAYER, width, HEIGHT, TINTS[number])
    picture.text(edge(first) + (width + STEP) / 2, LAYER + 26, "attention layer", 20, INK, text_anchor="middle")


def block(picture: Picture, x: float, y: float, fill: str, words: str, color: str) -> None:
    picture.rect(x, y, BOX, HEIGHT, fill)
    picture.text(x + BOX / 2, y + 26, words, 20, color, text_anchor="middle", font_weight="600")


def edge(token: int) -> float:
    """The left edge of a token's box."""
    return LEFT + token * STEP


if __name__ == "__main__":
    main()
