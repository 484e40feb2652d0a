"""Runs of whole training steps beside other tools: their cells, and the rows and sentences of their page."""

from collections import defaultdict, namedtuple
from collections.abc import Iterable


TOOLS = {
    "ours": "ours",
    "ours+float8": "ours, FP8",
    "ours+shared": "ours, shared prompts",
    "liger": "TRL with Liger",
    "unsloth": "Unsloth",
    "padded": "TRL, padded batches",
}
# A cell names these if it lacks them.
EXPECTED = ("ours", "liger", "unsloth")
Cell = namedtuple("Cell", "model lora load_in_4bit checkpointing tokens documents task prompt machine")
# Of runs that name none.
DEFAULTS = {"task": "sft", "prompt": 0, "load_in_4bit": False}
TASKS = ("sft", "dpo", "grpo")
# The run of a cell whose steps count. Caches hardly matter after the first steps.
PREFERRED = ("filled", "partly", "empty")


def grouped(runs: list[dict]) -> dict[Cell, dict[str, dict]]:
    """Return a run of each tool by cell, DPO and GRPO last, small shapes first and full fine-tuning before LoRA.

    `first_step_seconds` is that of a run with empty caches, if there is one.
    """
    cells = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        cells[cell(run)][run["tool"]][run["caches"]] = run
    in_order = sorted(cells, key=lambda key: (TASKS.index(key.task), size(key.model), *key[:6]))
    return {key: {tool: chosen(by_caches) for tool, by_caches in cells[key].items()} for key in in_order}


def cell(run: dict) -> Cell:
    return Cell(**{name: run.get(name, DEFAULTS.get(name, "")) for name in Cell._fields})


def size(model: str) -> float:
    """Return the number of billions in the name of a shape."""
    return float("".join(c for c in model.split("B")[0] if c.isdigit() or c == ".") or 0)


def chosen(by_caches: dict[str, dict]) -> dict:
    there = [by_caches[name] for name in PREFERRED if name in by_caches]
    # Of a step in two halves, only the first step says something.
    whole = [run for run in there if "step_ms" in run and not in_halves(run)]
    run = whole[0] if whole else {name: there[0][name] for name in there[0] if name != "step_ms"}
    return run | {"first_step_seconds": by_caches.get("empty", {}).get("first_step_seconds")}


def in_halves(run: dict) -> bool:
    """Return whether the run accumulated gradients. GRPO computes batches in parts by itself."""
    return run.get("forwards_per_step", 1) > 1 and cell(run).task != "grpo"


def title(key: Cell) -> str:
    task = key.task.upper() if key.task != "sft" else ""
    return ", ".join(filter(None, (key.model, task, training(key))))


def training(key: Cell) -> str:
    """Return what trains, and whether activations are computed again."""
    return trained(key) + ", checkpointing" * key.checkpointing


def trained(key: Cell) -> str:
    return "QLoRA" if key.load_in_4bit else "LoRA" if key.lora else "full"


def label(tool: str, run: dict | None) -> str:
    return f"{TOOLS[tool]}, CUDA graphs" if run and "graphs_GiB" in run else TOOLS[tool]


def gpu(machine: str) -> str:
    return machine.removeprefix("NVIDIA ").split()[0]


def rows(cells: dict[Cell, dict[str, dict]]) -> list[dict]:
    """Return a row for each cell, with the steps of all tools."""
    return [
        {
            "name": title(key),
            "tokens": key.tokens,
            "gpu": gpu(key.machine),
            "steps": {tool: run for tool, run in runs.items() if "step_ms" in run},
        }
        for key, runs in cells.items()
    ]


def ratios(cells: dict[Cell, dict[str, dict]]) -> dict[str, dict[str, list[float]]]:
    """Return the times of other tools over ours, by the kind of the training and the tool."""
    found = defaultdict(lambda: defaultdict(list))
    for key, runs in cells.items():
        for tool in ("liger", "unsloth"):
            run, ours = runs.get(tool, {}), runs.get("ours", {})
            if "step_ms" in run and "step_ms" in ours:
                found[kind(key, run)][TOOLS[tool]].append(run["step_ms"] / ours["step_ms"])
    return found


def kind(key: Cell, run: dict) -> str:
    """Return what the headline tells apart."""
    parts = (
        f"with {key.task.upper()}" if key.task != "sft" else "",
        "with QLoRA" if key.load_in_4bit else "",
        "with a mixture of experts" if "experts" in run else "",
    )
    return " ".join(filter(None, parts))


def losses_apart(cells: dict[Cell, dict[str, dict]]) -> float:
    """Return the largest relative difference of a logged loss from that of ours, in fine-tuning without FP8."""
    found = [0.0]
    for key, runs in cells.items():
        ours = runs.get("ours", {}).get("losses", {})
        for tool, run in runs.items():
            if key.task == "sft" and "float8" not in tool:
                found += [abs(run["losses"][at] / loss - 1) for at, loss in ours.items() if at in run["losses"]]
    return max(found)


def logps_apart(cells: dict[Cell, dict[str, dict]], task: str) -> float:
    """Return the largest difference of the last log-probabilities among the tools of a cell."""
    found = [0.0]
    for key, runs in cells.items():
        if key.task == task:
            last = [list(run["logps"].values())[-1] for run in runs.values() if "logps" in run]
            found += [max(values) - min(values) for values in zip(*last, strict=True)]
    return max(found)


def earlier(runs: list[dict]) -> list[dict]:
    """Return runs of the same tool in the same cell, whose steps the table does not state."""
    last = {(cell(run), run["tool"], run["caches"]): run for run in runs}
    return [run for run in runs if last[cell(run), run["tool"], run["caches"]] is not run]


def isolated(run: dict) -> bool:
    """Return whether the check of a run found no leak. Runs of DPO and of single documents have no check."""
    found = run.get("isolation")
    rounding = 1e-6 * found["loss"] if found and "experts" in run else 0
    left_out = cell(run).task == "dpo" or run["documents"] == 1
    return left_out or (found is not None and found["changed"] <= max(found["repeated"], rounding))


def values(runs: list[dict], name: str) -> str:
    """Return the values of a field, or the lengths of lists."""
    found = {len(run[name]) if isinstance(run[name], list) else run[name] for run in runs}
    return listed(map(str, sorted(found) or ["no"]), "or")


def listed(items: Iterable[str], word: str = "and") -> str:
    *most, last = items
    return f"{', '.join(most)} {word} {last}" if most else last


def common(runs: list[dict]) -> dict[str, str]:
    """Return the packages that every run has in the same version."""
    first = runs[0]["versions"] if runs else {}
    return {name: at for name, at in first.items() if all(run["versions"].get(name) == at for run in runs)}


def versions(runs: list[dict]) -> list[tuple[str, str]]:
    """Return a line for each environment with the versions of its other packages. All forms of `ours` share one."""
    known, found = common(runs), defaultdict(lambda: defaultdict(dict))
    for run in runs:
        tool = TOOLS[run["tool"].partition("+")[0]]
        for name, at in run["versions"].items():
            if name not in known:
                found[tool][name][at] = None
    texts = defaultdict(list)
    for tool, packages in found.items():
        texts[", ".join(f"{name} {' and '.join(sorted(at))}" for name, at in packages.items())].append(tool)
    return [(f"Versions, {listed(tools)}", text) for text, tools in texts.items()]
