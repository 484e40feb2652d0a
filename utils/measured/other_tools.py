"""Runs of whole training steps beside other tools: their cells, and the rows and sentences of their page."""

from collections import defaultdict


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
CELL = ("model", "lora", "checkpointing", "tokens", "documents", "task", "prompt", "machine")
# Of runs that name none.
DEFAULTS = {"task": "sft", "prompt": 0}
# The run of a cell whose steps count. Caches hardly matter after the first steps.
PREFERRED = ("filled", "partly", "empty")


def grouped(runs: list[dict]) -> dict[tuple, dict[str, dict]]:
    """Return a run of each tool by cell, DPO last, small shapes first and full fine-tuning before LoRA.

    `first_step_seconds` is that of a run with empty caches, if there is one.
    """
    cells = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        cells[cell(run)][run["tool"]][run["caches"]] = run
    in_order = sorted(cells, key=lambda key: (key[5] != "sft", size(key[0]), *key[:5]))
    return {key: {tool: chosen(by_caches) for tool, by_caches in cells[key].items()} for key in in_order}


def cell(run: dict) -> tuple:
    return tuple(run.get(name, DEFAULTS.get(name, "")) for name in CELL)


def size(model: str) -> float:
    """Return the number of billions in the name of a shape."""
    return float("".join(c for c in model.split("B")[0] if c.isdigit() or c == ".") or 0)


def chosen(by_caches: dict[str, dict]) -> dict:
    there = [by_caches[name] for name in PREFERRED if name in by_caches]
    # Of a step in two halves, only the first step says something.
    whole = [run for run in there if "step_ms" in run and run["forwards_per_step"] == 1]
    run = whole[0] if whole else {name: there[0][name] for name in there[0] if name != "step_ms"}
    return run | {"first_step_seconds": by_caches.get("empty", {}).get("first_step_seconds")}


def title(key: tuple) -> str:
    model, lora, checkpointing, tokens, documents, task, *_ = key
    length = f"{tokens:,} tokens in {documents} documents"
    if task == "dpo":
        model, length = f"{model}, DPO", f"{documents // 2} pairs of {tokens:,} tokens"
    parts = (model, "LoRA" if lora else "full", "checkpointing" if checkpointing else "", length, gpu(key))
    return ", ".join(filter(None, parts))


def label(tool: str, run: dict | None) -> str:
    return f"{TOOLS[tool]}, CUDA graphs" if run and "graphs_GiB" in run else TOOLS[tool]


def gpu(key: tuple) -> str:
    """Return the short name of the machine of a cell."""
    return key[-1].removeprefix("NVIDIA ").split()[0]


def rows(cells: dict[tuple, dict[str, dict]]) -> list[dict]:
    """Return a row for each tool of each cell. It has the step of `ours` in its cell, if both were measured."""
    found = []
    for key, runs in cells.items():
        ours = runs.get("ours", {}).get("step_ms")
        for tool in TOOLS:
            if tool in runs or tool in EXPECTED:
                run = runs.get(tool, {})
                found.append({"cell": title(key), "tool": label(tool, run), "run": run, "ours": ours})
    return found


def ratios(cells: dict[tuple, dict[str, dict]]) -> dict[str, dict[str, list[float]]]:
    """Return the times of other tools over ours, by the kind of the training and the tool."""
    found = defaultdict(lambda: defaultdict(list))
    for runs in cells.values():
        for tool in ("liger", "unsloth"):
            run, ours = runs.get(tool, {}), runs.get("ours", {})
            if "step_ms" in run and "step_ms" in ours:
                found[kind(run)][TOOLS[tool]].append(run["step_ms"] / ours["step_ms"])
    return found


def kind(run: dict) -> str:
    """Return what the headline tells apart."""
    parts = ("with DPO" if is_dpo(run) else "", "with a mixture of experts" if "experts" in run else "")
    return " ".join(filter(None, parts))


def is_dpo(run: dict) -> bool:
    return run.get("task") == "dpo"


def earlier(runs: list[dict]) -> list[dict]:
    """Return runs of the same tool in the same cell, whose steps the table does not state."""
    last = {(cell(run), run["tool"], run["caches"]): run for run in runs}
    return [
        {"cell": title(cell(run)), "tool": label(run["tool"], run), "run": run}
        for run in runs
        if last[cell(run), run["tool"], run["caches"]] is not run
    ]


def isolated(run: dict) -> bool:
    """Return whether the check of a run found no leak. Runs of DPO have no check."""
    found = run.get("isolation")
    rounding = 1e-6 * found["loss"] if found and "experts" in run else 0
    return is_dpo(run) or (found is not None and found["changed"] <= max(found["repeated"], rounding))


def values(runs: list[dict], name: str) -> str:
    *most, last = map(str, sorted({run[name] for run in runs}) or ["no"])
    return f"{', '.join(most)} or {last}" if most else last


def common(runs: list[dict]) -> dict[str, str]:
    """Return the packages that every run has in the same version."""
    first = runs[0]["versions"] if runs else {}
    return {name: at for name, at in first.items() if all(run["versions"].get(name) == at for run in runs)}


def versions(runs: list[dict]) -> list[tuple[str, str]]:
    """Return a line for each tool with the versions of its other packages."""
    known, lines = common(runs), []
    for tool, name in TOOLS.items():
        others = (
            [f"{x} {at}" for x, at in run["versions"].items() if x not in known] for run in runs if run["tool"] == tool
        )
        text = "; ".join(dict.fromkeys(", ".join(other) for other in others))
        lines += [(f"Versions, {name}", text)] if text else []
    return lines
