"""How the pages of measurements select runs from the JSON, and how they write figures."""

import re
import sys
from decimal import ROUND_HALF_UP, Decimal

import other_tools
import what_fits


def fixed(value: float, digits: int = 0) -> str:
    """Write a number with so many decimals, halves rounded up."""
    return f"{Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def percent(share: float, digits: int = 0) -> str:
    return f"{fixed(100 * share, digits)} %"


def change(value: float, base: float) -> str:
    """Write the difference in percent, with its sign."""
    share = value / base - 1
    return f"{'+' if share >= 0 else '−'}{percent(abs(share), 2)}"


def differences(values: list[float], base: list[float]) -> list[float]:
    """Return the relative difference of each value, without its sign."""
    return [abs(value / other - 1) for value, other in zip(values, base, strict=True)]


def tests_that(outcome: dict | str, what: str) -> int:
    """Return how many tests of a run passed or failed. Some outcomes are text, such as `25 passed`."""
    if isinstance(outcome, str):
        return sum(int(number) for number in re.findall(rf"(\d+) {what}", outcome))
    return outcome[what]


def differs_most(values: list[float], base: list[float], without: int) -> float:
    """Return the largest relative difference of steps from those of another run, without one of them."""
    return max(x for step, x in enumerate(differences(values, base), start=1) if step != without)


def span(shares: list[float], digits: int = 2) -> str:
    """Write the lowest and the highest share in percent."""
    low, high = (fixed(100 * x, digits) for x in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def versions(*machines: dict[str, str]) -> str:
    """Write the version of each package, or all of them where machines differ."""
    found = {}
    for machine in machines:
        for name, version in machine.items():
            found.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(at)}" for name, at in found.items() if name != "gpu")


def find(runs: list[dict], *arms: str, **wanted) -> list[dict]:
    """Return the runs that have these arms and these values. A value of None also stands for one that is missing."""
    return [
        run
        for run in runs
        if all(arm in run.get("arms", ()) for arm in arms) and all(run.get(name) == x for name, x in wanted.items())
    ]


def last_of_each(runs: list[dict], *names: str) -> list[dict]:
    """Return the last run of those with the same values of these names, small shapes first."""
    last = {tuple(run.get(name) or None for name in names): run for run in runs}
    return sorted(last.values(), key=lambda run: (other_tools.size(run["model"]), run["tokens"]))


def spread(runs: dict | list, name: str) -> list:
    """Return the values of this name at any depth."""
    values = []
    for key, value in runs.items() if isinstance(runs, dict) else enumerate(runs):
        if key == name:
            values.append(value)
        elif isinstance(value, dict | list):
            values += spread(value, name)
    return values


def kernels(counts: dict) -> str:
    """Write how many kernels were compiled, loaded from disk and recorded."""
    loaded = sum(entry["number"] for name, entry in counts.items() if name.endswith(" from disk"))
    graphs = counts.get("cuda graph", {"number": 0})["number"]
    compiled = sum(entry["number"] for entry in counts.values()) - loaded - graphs
    parts = [(compiled, "compiled"), (loaded, "loaded"), (graphs, "graphs")]
    return ", ".join(f"{number} {what}" for number, what in parts if number) or "none"


def across(matrix: list[list[float]] | None) -> float:
    """Return the largest influence of a document on another one."""
    return max((x for i, row in enumerate(matrix or []) for j, x in enumerate(row) if i != j), default=0.0)


def as_expected(launch: dict) -> bool:
    return launch["status"] != "failed" and all(check["passed"] for check in launch.get("checks", {}).values())


def largest_checked(launches: list[dict], figure: str) -> str:
    """Write the largest difference of a figure, such as `losses of`, that the checks of these launches found."""
    checks = [check for launch in launches for check in launch.get("checks", {}).items()]
    return percent(max(found), 2) if (found := [x["largest"] for name, x in checks if name.startswith(figure)]) else ""


def one_of_each(commands: list[str]) -> list[str]:
    """Return the first command of each script and launcher."""
    first = {}
    for command in commands:
        first.setdefault(tuple(re.findall(r"\b(?:accelerate|torchrun|python|[\w/]+\.py)\b", command)), command)
    return list(first.values())


def require(condition: bool, message: str) -> str:
    """End with an error if the results are not what the words of a page say."""
    return "" if condition else sys.exit(message)


def gpu_errors(suite: dict) -> dict[str, float]:
    """Return the largest errors of the tests on a GPU, and the number of comparisons of isolation as `leaks`."""
    all_figures = [figure for runs in suite.values() for entry in runs.values() for figure in entry["figures"]]

    def largest(name: str, *parts: str, without: tuple = (), group: str | None = None) -> float:
        return max(
            figure[name]
            for figure in all_figures
            if isinstance(figure.get(name), float)
            and (group or name) in figure
            and all(part in figure["test"] for part in parts)
            and not any(part in figure["test"] for part in without)
        )

    leaks = [figure for figure in all_figures if "others" in figure]
    outcomes = {(figure["others"], figure["gradients"]) for figure in leaks}
    require(
        outcomes == {("bit for bit the same", "exactly 0 across")}, "gpu_tests.json: a document changes another one"
    )
    half, kernel = {"without": ("float32 (",), "group": "logits"}, {"without": ("reference", "per_document")}
    graphs = [
        value
        for figure in all_figures
        if "graphs" in figure["test"]
        for name, value in figure.items()
        if name.endswith("gradients") and isinstance(value, float)
    ]
    return {
        "leaks": len(leaks),
        "logits": largest("logits", **half),
        "gradients": largest("gradients", **half),
        "hooked": largest("gradients", "each module hooked"),
        "float32": max(largest(name, "float32 (", group="logits") for name in ("logits", "gradients")),
        "triton": largest("triton", "bfloat16"),
        "graphs": max(graphs),
        "kernels": {
            name.strip(")"): largest("output", name, "bfloat16", **kernel)
            for name in ("gated_delta_rule", "causal_conv1d", "varlen_attn", "flex_attention)")
        },
    }


FORMATS = {
    "fixed": fixed,
    "percent": percent,
    "span": span,
    "kernels": kernels,
    "across": across,
    "largest_checked": largest_checked,
    "differs_most": differs_most,
    "tests_that": tests_that,
    "one_of_each": one_of_each,
    "list_values": lambda found: list(found.values()),
    "tool_name": other_tools.TOOLS.get,
    "ms": lambda value: f"{fixed(value)} ms",
    "seconds": lambda value, digits=0: f"{fixed(value, digits)} s",
    "gib": lambda value: f"{fixed(value, 1)} GiB",
    "times": lambda ratio: f"{ratio:.3g} x",
    "commas": lambda number: f"{number:,}",
    "error": lambda value: f"{value:.1e}".replace("e-0", "e-"),
}
TESTS = {
    "startswith": str.startswith,
    "as_expected": as_expected,
    "isolated": other_tools.isolated,
    "in_halves": other_tools.in_halves,
}
SELECTIONS = {
    "find": find,
    "last_of_each": last_of_each,
    "spread": spread,
    "change": change,
    "differences": differences,
    "versions_of": versions,
    "require": require,
    "gpu_errors": gpu_errors,
    "other_tools": other_tools,
    "what_fits": what_fits,
}
