"""A padded batch of two prompts with two answers each, and the row in which each prompt stands once."""

from svg import DOCUMENTS, INK, MUTED, Picture, draw_reads


UNIT, GAP, LEFT = 25.6, 4, 24
PROMPTS = (6, 5)
# The letter, the prompt and the length of each answer.
ANSWERS = (("A", 0, 3), ("B", 0, 4), ("C", 1, 3), ("D", 1, 2))
WINDOW = 3
TINTS = ("#d6e4f7", "#f6dfc6")
PADDING = "#eef1f4"
ROWS, ROW, TRACKS = 94, 292, 378


def main() -> None:
    padded, real, once = count()
    picture = Picture(
        496, "A padded batch repeats each prompt; the packed row has it once, and each answer continues its own prompt"
    )
    detail = f"Each prompt once, before its answers: {once} tokens, not {padded}"
    picture.caption("Prompts with several answers in a packed row", detail)
    draw_batch(picture)
    x = LEFT + (max(PROMPTS) + longest()) * UNIT + 26
    picture.text(x, ROWS + 52, "padded batch:", 20, MUTED)
    picture.text(x, ROWS + 78, f"{padded} tokens, {real} of them real", 20, MUTED)
    picture.text(LEFT, ROW - 14, f"packed row: {once} tokens", 20, MUTED)
    places = draw_row(picture)
    picture.text(LEFT, TRACKS - 14, "Answer B reads its prompt and itself:", 20, font_weight="600")
    (_, end), (start, _) = prompt, answer = places["0"], places["B"]
    window, arrow = WINDOW * UNIT - GAP, (start - 48, start - 8)
    draw_reads(picture, TRACKS + 8, prompt, answer, window, end + 16, arrow)
    picture.write(__file__)


def longest() -> int:
    return max(length for _, _, length in ANSWERS)


def count() -> tuple[int, int, int]:
    """The tokens of the padded batch, the real ones, and those of the packed row."""
    answers = sum(length for _, _, length in ANSWERS)
    real = answers + sum(PROMPTS[prompt] for _, prompt, _ in ANSWERS)
    return len(ANSWERS) * (max(PROMPTS) + longest()), real, answers + sum(PROMPTS)


def block(picture: Picture, x: float, y: float, tokens: int, height: float, prompt: int, words: str) -> None:
    """A prompt in full colour, or an answer in the tint of its prompt."""
    width, is_prompt = tokens * UNIT - GAP, words.startswith("prompt")
    fill, color = (DOCUMENTS[prompt], "#ffffff") if is_prompt else (TINTS[prompt], INK)
    picture.rect(x, y, width, height, fill)
    picture.text(x + width / 2, y + height / 2 + 7, words, 20, color, text_anchor="middle", font_weight="600")


def draw_batch(picture: Picture) -> None:
    """Prompts are padded on the left and answers on the right, as TRL does."""
    middle = LEFT + max(PROMPTS) * UNIT
    for n, (letter, prompt, length) in enumerate(ANSWERS):
        y, start = ROWS + 36 * n, middle - PROMPTS[prompt] * UNIT
        picture.rect(LEFT, y, (max(PROMPTS) + longest()) * UNIT - GAP, 30, PADDING)
        block(picture, start, y, PROMPTS[prompt], 30, prompt, f"prompt {prompt}")
        block(picture, middle, y, length, 30, prompt, letter)


def draw_row(picture: Picture) -> dict[str, tuple[float, float]]:
    """Return the left and right edge of each part."""
    parts = [(str(n), n, length, f"prompt {n}") for n, length in enumerate(PROMPTS)]
    parts += [(letter, prompt, length, letter) for letter, prompt, length in ANSWERS]
    places, x = {}, LEFT
    for name, prompt, length, words in parts:
        block(picture, x, ROW, length, 40, prompt, words)
        places[name] = x, x + length * UNIT - GAP
        x += length * UNIT
    left, right = places["B"]
    picture.rect(left - 2, ROW - 2, right - left + 4, 44, "none", 6, stroke=INK, stroke_width=3)
    return places


if __name__ == "__main__":
    main()
