"""The steps of this package with the memory that they took, for the page on what fits on a GPU."""

import other_tools


# What tells steps apart.
KEY = ("model", "trained", "weights", "tokens", "checkpointing", "offload", "gpu", "optimizer")
# A full step has an optimizer. Runs of `lora.json` have none: the adapters' AdamW takes little.
QUANTIZED = {"ours+lora": "LoRA", "ours+qlora": "QLoRA"}


def steps(peers: list[dict], whole_steps: list[dict], lora: list[dict]) -> list[dict]:
    """Return a row for each measured step of this package, by size of the model and by memory.

    Of runs with the same settings on the same kind of GPU, the last one counts, and of both kinds the smaller one.
    """
    found = {}
    for run in lora:
        for name, trained in QUANTIZED.items():
            if name in run["arms"] and run["checkpointing"]:
                arm = run["arms"][name]
                add(found, run, trained, arm["median_ms"], arm["peak_GiB"], "H200", optimizer=False)
    for run in whole_steps:
        # Rows of one document are slower, segments take less, and fewer checkpoints more.
        others = run["graphs"] or any(run.get(name) for name in ("one_document", "segment_tokens", "every_n_layers"))
        if "error" not in run and run["kind"] != "ddp" and not others:
            trained, gpu = "LoRA" if run["lora"] else "full", other_tools.gpu(run["machine"])
            trained = "QLoRA" if run["weights"] == "nf4" else trained
            add(found, run, trained, run["step_ms"], whole_peak(run), "2 x " * (run["gpus"] > 1) + gpu)
    for cell, runs in other_tools.grouped(peers).items():
        run = runs.get("ours", {})
        if "step_ms" in run and cell.task == "sft":
            add(found, run, other_tools.trained(cell), run["step_ms"], whole_peak(run), other_tools.gpu(cell.machine))
    rows = [row for row in found.values() if row["gpu"] != "H200" or key(row | {"gpu": "H100"}) not in found]
    return sorted(rows, key=lambda row: (other_tools.size(row["model"]), row["gib"]))


def whole_peak(run: dict) -> float:
    """The GiB of a step with those that its CUDA graphs keep."""
    return run["peak_GiB"] + run.get("graphs_GiB", 0)


def add(found: dict, run: dict, trained: str, ms: float, gib: float, gpu: str, optimizer: bool = True) -> None:
    weights = "4 bit" if trained == "QLoRA" else run.get("weights", "bfloat16").replace("float8", "FP8 by torchao")
    weights += ", products in FP8" * bool(run.get("float8"))
    row = {"model": run["model"], "trained": trained, "weights": weights, "tokens": run["tokens"], "gpu": gpu}
    row |= {"checkpointing": run["checkpointing"], "offload": run.get("offload", False), "optimizer": optimizer}
    found[key(row)] = row | {"ms": ms, "gib": gib, "graphs": "graphs_GiB" in run}


def key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY)
