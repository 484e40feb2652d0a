"""What the figures share: colours, and a picture that writes the same bytes each time."""

from pathlib import Path
from xml.sax.saxutils import escape


INK, MUTED, LINE = "#1f2328", "#59636e", "#d1d9e0"
RED, GREEN = "#cf222e", "#1a7f37"
# One colour per document; dark enough for white type.
DOCUMENTS = ("#2f6fd0", "#b8620a", "#7a4fc0")
# The colours of a dark page, by element and colour of a light one. White type stays on the documents, which stay as well.
DARK = {
    ("rect", "#ffffff"): "#151b23",
    ("rect", "#f6f8fa"): "#212830",
    ("rect", "#eef1f4"): "#2a313c",
    ("rect", "#d6e4f7"): "#1d4273",
    ("rect", "#f6dfc6"): "#6b3a0c",
    ("*", INK): "#f0f6fc",
    ("*", MUTED): "#9198a1",
    ("*", LINE): "#3d444d",
    ("*", RED): "#f85149",
    ("*", GREEN): "#3fb950",
    ("text", DOCUMENTS[0]): "#79b0ff",
    ("text", DOCUMENTS[1]): "#f0a04b",
    ("text", DOCUMENTS[2]): "#b794f6",
}
# A browser draws the type, on GitHub without web fonts.
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"


class Picture:
    """An SVG on a card, which is light on a light page and dark on a dark one.

    Sizes are chosen for a width of 640, of which a phone shows little more than half: type of less than 19 is too small.
    """

    def __init__(self, height: int, title: str, width: int = 640):
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="{FONT}">',
            f"<title>{escape(title)}</title>",
            f"<style>@media (prefers-color-scheme: dark) {{\n{_rules()}\n}}</style>",
            f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="14" fill="#ffffff" stroke="{LINE}" stroke-width="2"/>',
        ]

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, radius: float = 5, **attributes
    ) -> None:
        size = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        self.parts.append(f'<rect {size} rx="{radius}" fill="{fill}"{_written(attributes)}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 3, **attributes) -> None:
        ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        self.parts.append(f'<line {ends} stroke="{color}" stroke-width="{width}"{_written(attributes)}/>')

    def arrow(self, x1: float, y: float, x2: float, color: str, width: float = 5, head: float = 9) -> None:
        """A horizontal arrow to the right, its point at `x2`."""
        self.line(x1, y, x2 - head, y, color, width)
        self.polygon([(x2, y), (x2 - 1.6 * head, y - head), (x2 - 1.6 * head, y + head)], color)

    def polygon(self, points: list[tuple[float, float]], fill: str, **attributes) -> None:
        corners = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self.parts.append(f'<polygon points="{corners}" fill="{fill}"{_written(attributes)}/>')

    def circle(self, x: float, y: float, radius: float, fill: str, **attributes) -> None:
        self.parts.append(
            f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{radius}" fill="{fill}"{_written(attributes)}/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 20, color: str = INK, **attributes) -> None:
        place = f'x="{_number(x)}" y="{_number(y)}" font-size="{size}" fill="{color}"'
        self.parts.append(f"<text {place}{_written(attributes)}>{escape(words)}</text>")

    def caption(self, title: str, detail: str) -> None:
        """Two lines that say what the picture shows, for readers who see nothing else of the page."""
        self.text(24, 42, title, 25, font_weight="700")
        self.text(24, 72, detail, 20, MUTED)

    def write(self, script: str) -> None:
        """Write the picture beside its script, under the script's name."""
        Path(script).with_suffix(".svg").write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


def draw_reads(
    picture: Picture,
    top: float,
    earlier: tuple[float, float],
    own: tuple[float, float],
    window: float,
    words_at: float,
    arrow: tuple[float, float],
) -> None:
    """What the layers of a document combine: a track for each kind, from the tokens before it to its own.

    The document has the left and right edge `own`, and all that it continues has `earlier`.
    """
    (first, end), (start, last) = earlier, own
    tracks = (("attention", first, last), ("convolution", end - window, start + window), ("delta rule", None, None))
    for n, (words, left, right) in enumerate(tracks):
        y = top + 36 * n
        if left is None:
            for x in (end - 10, start + 10):
                picture.text(x, y + 16, "S", 24, GREEN, text_anchor="middle", font_weight="700")
        else:
            picture.rect(left, y, end - left, 16, GREEN, 4)
            picture.rect(start, y, right - start, 16, GREEN, 4)
        picture.text(words_at, y + 14, words, 20)
        picture.arrow(arrow[0], y + 8, arrow[1], GREEN, 4, 7)


def _rules() -> str:
    return "\n".join(
        f'{element}[{name}="{light}"] {{ {name}: {dark} }}'
        for (element, light), dark in DARK.items()
        for name in ("fill", "stroke")
        if name == "fill" or element == "*"
    )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _written(attributes: dict) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
