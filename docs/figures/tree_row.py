"""A tree of turns, the row that has each turn once, and what one of the turns reads."""

from svg import DOCUMENTS, INK, LINE, MUTED, Picture, draw_reads


UNIT, GAP, LEFT = 24.6, 4, 24
# Name, length, parent, and the place in the tree from the top, in the order of the row.
TURNS = (
    ("P", 5, None, 1.5),
    ("A", 4, "P", 0.5),
    ("B", 3, "P", 2.5),
    ("C", 3, "A", 0),
    ("D", 4, "A", 1),
    ("E", 2, "B", 2),
    ("F", 3, "B", 3),
)
LENGTHS = {name: length for name, length, _, _ in TURNS}
PARENTS = {name: parent for name, _, parent, _ in TURNS}
READER, WINDOW = "D", 3
TREE, BRANCH, ROW, TRACKS = 94, 28, 302, 430


def main() -> None:
    picture = Picture(
        546, "A tree of seven turns; the packed row has each turn once, and turn D reads P, A and itself"
    )
    detail = f"Each turn once, after those it continues: {sum(LENGTHS.values())} tokens, not {separate_tokens()}"
    picture.caption("A tree of turns in a packed row", detail)
    right = draw_tree(picture)
    picture.text(right + 24, TREE + 60, "as four samples:", 20, MUTED)
    picture.text(right + 24, TREE + 86, f"{separate_tokens()} tokens", 20, MUTED)
    picture.text(LEFT, ROW - 14, f"packed row: {sum(LENGTHS.values())} tokens", 20, MUTED)
    places = draw_row(picture)
    draw_levels(picture, places)
    picture.text(LEFT, TRACKS - 10, "Turn D reads P, A and itself:", 20, font_weight="600")
    (first, _), (_, end), (start, last) = places["P"], places["A"], places[READER]
    window, arrow = WINDOW * UNIT - GAP, (end + 14, start - 10)
    draw_reads(picture, TRACKS + 8, (first, end), (start, last), window, last + 14, arrow)
    picture.write(__file__)


def path_to(name: str | None) -> list[str]:
    return [] if name is None else [*path_to(PARENTS[name]), name]


def level_of(name: str) -> int:
    return len(path_to(name)) - 1


def separate_tokens() -> int:
    """The tokens of a sample for each turn that no other continues."""
    last = [name for name in LENGTHS if name not in PARENTS.values()]
    return sum(LENGTHS[turn] for name in last for turn in path_to(name))


def block(picture: Picture, x: float, y: float, height: float, name: str) -> None:
    width = LENGTHS[name] * UNIT - GAP
    picture.rect(x, y, width, height, DOCUMENTS[level_of(name)])
    picture.text(x + width / 2, y + height / 2 + 7, name, 20, "#ffffff", text_anchor="middle", font_weight="600")
    if name == READER:
        picture.rect(x - 2, y - 2, width + 4, height + 4, "none", 6, stroke=INK, stroke_width=3)


def draw_tree(picture: Picture) -> float:
    """From left to right by position in the sample. Return the right edge."""
    ends = {None: (LEFT - BRANCH, 0.0)}
    for name, length, parent, place in TURNS:
        x, y = ends[parent][0] + BRANCH, TREE + 42 * place
        if parent is not None:
            picture.line(*ends[parent], x, y + 15, LINE)
        ends[name] = x + length * UNIT - GAP, y + 15
        block(picture, x, y, 30, name)
    return max(x for x, _ in ends.values())


def draw_row(picture: Picture) -> dict[str, tuple[float, float]]:
    """Return the left and right edge of each turn."""
    places, x = {}, LEFT
    for name, length in LENGTHS.items():
        block(picture, x, ROW, 40, name)
        places[name] = x, x + length * UNIT - GAP
        x += length * UNIT
    return places


def draw_levels(picture: Picture, places: dict[str, tuple[float, float]]) -> None:
    for level in range(3):
        edges = [edge for name, edges in places.items() if level_of(name) == level for edge in edges]
        left, right = min(edges), max(edges)
        picture.line(left, ROW + 52, right, ROW + 52, DOCUMENTS[level])
        picture.text((left + right) / 2, ROW + 76, f"level {level + 1}", 20, MUTED, text_anchor="middle")


if __name__ == "__main__":
    main()
