"""What the pages of measurements share: the card, and how figures are written."""

import textwrap
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal


# The commit that brought a result into the repository, as `git log --follow` of its JSON shows it.
STEPS, GRAPHS, GRAPHS_AGAIN = ("e9f80da", "2026-11-21"), ("0815d4b", "2026-11-21"), ("28185c4", "2026-11-22")
LORA, LORA_AGAIN = ("cd9e309", "2026-11-22"), ("9a77062", "2026-11-23")
FLOAT8, PREFERENCE = ("e913992", "2026-11-23"), ("e066fe6", "2026-11-23")
FLOAT8_AGAIN = HEAD = ("57c47da", "2026-11-23")
DATA_PARALLEL = ("c8ab49a", "2026-11-23")
WHOLE_STEPS, LAUNCHES, TORCHAO = ("1fefe58", "2026-11-24"), ("207a726", "2026-11-24"), ("207a726", "2026-11-24")
PRODUCTS = ("09dfe08", "2026-11-24")
LAUNCHES_AGAIN, LONG_DOCUMENTS = ("024c918", "2026-11-25"), ("a1d04e9", "2026-11-25")
PEERS, PEERS_AGAIN = ("39b7774", "2026-11-25"), ("66ecdbc", "2026-11-25")
PLANS_AGAIN, WHOLE_STEPS_AGAIN = ("e96ba0e", "2026-11-25"), ("c6cd7d7", "2026-11-25")
FIRST_STEPS = ("821b3a4", "2026-11-23")
MOE, EXPERTS = ("a206846", "2026-11-22"), ("9a77062", "2026-11-23")
ROOMS, UNTOUCHED = ("66c1d1e", "2026-11-22"), ("237c47e", "2026-11-22")
CPU, PLANS, RANKS = ("5725bd1", "2026-11-21"), ("264b7dc", "2026-11-21"), ("276843b", "2026-11-21")
AUDIT_FLA, AUDIT = ("b035bfd", "2026-11-21"), ("28185c4", "2026-11-22")
GPU_TESTS_FIRST, GPU_TESTS, TRIED = ("2b82bdb", "2026-11-21"), ("237c47e", "2026-11-22"), ("9478615", "2026-11-22")


@dataclass
class Card:
    """A page: `headline` is its claim, and goes into the index without markup."""

    title: str
    headline: str
    body: list[str]
    results: list[str]
    machine: str
    versions: dict
    commands: list[str]
    committed: list[tuple[str, str]]
    number: str = ""
    extra: list[tuple[str, str]] = field(default_factory=list)

    def page(self, links: dict) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        commits = ", ".join(f"`{commit}` ({day})" for commit, day in self.committed)
        rows = [("Machine", self.machine), *self.extra, ("Versions", versions), ("Results added in commit", commits)]
        rows.append(("Raw results", ", ".join(f"[{name}]({links['results']}/{name})" for name in self.results)))
        commands = "\n".join(dict.fromkeys(self.commands))
        parts = [f"# {self.title}", f"**{self.headline}**", *self.body, "## Source", table(("", ""), rows)]
        return "\n\n".join([*(wrapped(part) for part in parts), f"```bash\n{commands}\n```"])


def wrapped(part: str) -> str:
    """A paragraph in lines of equal length; headings, tables and pictures as they are."""
    if part[0] in "#|!":
        return part
    return textwrap.fill(" ".join(part.split()), 119, break_long_words=False, break_on_hyphens=False)


def table(header: tuple, rows: list[tuple]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def fixed(value: float, digits: int) -> str:
    """A number with so many decimals, halves rounded up."""
    return f"{Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def ms(arm: dict) -> str:
    return f"{fixed(arm['median_ms'], 0)} ms"


def gib(arm: dict) -> str:
    return f"{fixed(arm['peak_GiB'], 1)} GiB" if "peak_GiB" in arm else ""


def small(error: float) -> str:
    return f"{error:.1e}".replace("e-0", "e-")


def times(ratio: float) -> str:
    return f"{ratio:.3g} x"


def percent(share: float, digits: int = 0) -> str:
    return f"{fixed(100 * share, digits)} %"


def against(run: dict, arm: str) -> str:
    """An arm's time, its ratio to ours and its memory."""
    if arm not in run["arms"]:
        return ""
    there = run["arms"][arm]
    ratio = there["median_ms"] / run["arms"]["ours"]["median_ms"]
    return ", ".join(filter(None, [f"{ms(there)} ({times(ratio)})", gib(there)]))


def step_runs(results: dict, model: str, tokens: int, lengths: str = "lognormal", checkpointing: bool = False) -> list:
    wanted = (model, tokens, lengths, checkpointing)
    runs = results["step.json"]["runs"]
    return [run for run in runs if (run["model"], run["tokens"], run["lengths"], run["checkpointing"]) == wanted]


def compared(results: dict, model: str, tokens: int, lengths: str = "lognormal") -> dict:
    """The last such run with the stock class beside ours."""
    return [run for run in step_runs(results, model, tokens, lengths) if "packed+varlen+liger" in run["arms"]][-1]


def on_gpu(results: dict, name: str = "step.json") -> dict:
    return {"machine": f"one {results[name]['machine']}", "versions": results[name]["versions"]}
