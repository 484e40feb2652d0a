"""The page of whole training steps beside other tools."""

from card import PEERS, PEERS_AGAIN, Card, fixed, gib, table, times


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


DPO = """*DPO* is the same with `DPOTrainer`. TRL 1.16 has no batches without padding there. *TRL with Liger* runs padded batches
with Liger's kernels in the layers, and *ours* packs them in the model. The reference of LoRA is the model without its
adapters, or for Unsloth with a frozen copy of them. Of full fine-tuning, it is a second model. The tokens of a step count each prompt twice. *One row* is then that
of the policy, which with shared prompts has each prompt once. The first loss is log 2, with a router's loss in a mixture."""
MIXTURE = """A mixture of experts whose name ends with 12L has 12 layers. Its adapters are on the linear layers and on the
experts. *TRL with Liger* needs a name that Liger 0.8.5 cannot import there, and with LoRA it has Transformers' experts."""


def task(run: dict) -> str:
    return run.get("task", DEFAULTS["task"])


def kind(run: dict) -> str:
    """What the headline tells apart."""
    parts = (["DPO"] if task(run) == "dpo" else []) + (["a mixture of experts"] if "experts" in run else [])
    return " of ".join(parts)


def not_measured(runs: list[dict]) -> str:
    left = [] if any("experts" in run for run in runs) else ["mixtures of experts"]
    left += [] if any(task(run) == "dpo" for run in runs) else ["DPO"]
    return f"Not measured: {', '.join(['other shapes', *left])} and GRPO beside other tools."


def peers(results: dict) -> Card:
    cells = grouped(results["peers.json"]["runs"])
    rows, ratios = [], []
    for key, runs in cells.items():
        ours = runs.get("ours", {}).get("step_ms")
        for tool in [tool for tool in TOOLS if tool in runs or tool in EXPECTED]:
            run = runs.get(tool)
            rows.append((title(key), label(tool, run), *figures(run, ours)))
            if run and ours and "step_ms" in run and tool in ("liger", "unsloth"):
                ratios.append((kind(run), tool, run["step_ms"] / ours))
    measured = [run for runs in cells.values() for run in runs.values() if "step_ms" in run]
    unsafe = sorted({TOOLS[run["tool"]] for run in measured if task(run) == "sft" and not isolated(run)})
    return Card(
        "Whole steps beside other tools",
        claim(ratios),
        [
            "![Milliseconds of a step of 16,384 tokens](../figures/training_step.svg)\n"
            "![Milliseconds of a step of 4,096 tokens](../figures/training_step_short.svg)",
            """A shape, such as 0.8B, has the layer sizes of the Qwen3.5 model of that name and random weights. Every tool trains
the same checkpoint on the same samples in the same order in its version of `SFTTrainer`. A step is loading, forward,
backward, clipping, fused AdamW and logging.""",
            table(
                ("Cell", "Tool", "Step", "Over ours", "Tokens/s", "Peak memory", "First step", "Losses", "One row"),
                rows,
            ),
            """*TRL with Liger* is the stock class with `padding_free=True` and `use_liger_kernel=True`. Without FlashAttention and
causal-conv1d, it has torch's `varlen_attn` and flash-linear-attention's convolution instead. TRL 1.16 takes the loss from
a head of its own, which also gives the entropy and the accuracy of tokens. With this package, that head has
[our products](../how_to/sft.md). *Unsloth* chooses its kernels and its
padding-free batches by itself.""",
            f"""The weights are in bfloat16, under autocast. LoRA has rank 16 on all linear layers, in float32. Each time is the median
of {shared(measured, "steps")} steps after {shared(measured, "warmup")} others. *First step* counts from
`trainer.train()`, and is stated where all kernel caches were empty. The losses are those of the first and the last log.
*One row* says whether the forward of each warm-up step got exactly one row of all tokens. Each run had one of two GPUs
of its machine, while another run had the other.""",
            """*Ours* has the defaults of [`configure_packing`](../how_to/trainer.md), which measured a row and then chose CUDA graphs
where the tool is named so. Their memory is part of the peak. Without graphs, steps of the 0.8B shape and those of 4,096
tokens wait for the host, whose speed differs between machines and steps. Graphs end with the training, so the check below
runs without them; `tests/gpu/test_trainer.py` compares their losses.""",
            *earlier(results["peers.json"]["runs"]),
            *halves(results["peers.json"]["runs"]),
            isolation(unsafe),
            *([DPO] if any(task(run) == "dpo" for run in measured) else []),
            *([MIXTURE] if any("experts" in run for run in measured) else []),
            not_measured(measured),
        ],
        ["peers.json"],
        machine=", ".join(dict.fromkeys(f"one {run['machine']}" for run in measured)),
        versions=common(measured),
        extra=[(f"Versions, {TOOLS[tool]}", text) for tool in TOOLS if (text := versions(tool, measured))],
        commands=[run["command"] for run in measured],
        committed=[PEERS, PEERS_AGAIN],
        number=claim(ratios, short=True),
    )


def grouped(runs: list[dict]) -> dict[tuple, dict[str, dict]]:
    """A run of each tool by cell, DPO last, small shapes first and full fine-tuning before LoRA.

    `first_step_seconds` is that of a run with empty caches, if there is one.
    """
    found = {}
    for run in runs:
        tools = found.setdefault(cell(run), {})
        tools.setdefault(run["tool"], {})[run["caches"]] = run
    size = lambda key: float("".join(c for c in key[0].split("B")[0] if c.isdigit() or c == ".") or 0)  # noqa: E731
    cells = sorted(found.items(), key=lambda item: (item[0][5] != "sft", size(item[0]), *item[0][:5]))
    return {key: {tool: chosen(by_caches) for tool, by_caches in tools.items()} for key, tools in cells}


def cell(run: dict) -> tuple:
    return tuple(run.get(name, DEFAULTS.get(name, "")) for name in CELL)


def chosen(by_caches: dict[str, dict]) -> dict:
    there = [by_caches[name] for name in PREFERRED if name in by_caches]
    # Of a step in two halves, only the first step says something.
    whole = [run for run in there if "step_ms" in run and run["forwards_per_step"] == 1]
    run = whole[0] if whole else {name: there[0][name] for name in there[0] if name != "step_ms"}
    return run | {"first_step_seconds": by_caches.get("empty", {}).get("first_step_seconds")}


def title(key: tuple) -> str:
    model, lora, checkpointing, tokens, documents, task, *_ = key
    parts = [model, *(["DPO"] if task == "dpo" else []), "LoRA" if lora else "full"]
    parts += ["checkpointing"] if checkpointing else []
    size = (
        f"{documents // 2} pairs of {tokens:,} tokens"
        if task == "dpo"
        else f"{tokens:,} tokens in {documents} documents"
    )
    return ", ".join([*parts, size, gpu(key)])


def label(tool: str, run: dict | None) -> str:
    return f"{TOOLS[tool]}, CUDA graphs" if run and "graphs_GiB" in run else TOOLS[tool]


def gpu(key: tuple) -> str:
    """The short name of the machine of a cell."""
    return key[-1].removeprefix("NVIDIA ").split()[0]


def figures(run: dict | None, ours: float | None) -> tuple:
    if not run or "step_ms" not in run:
        reason = (run or {}).get("error", (run or {}).get("stopped", "")).split(":")[0]
        return (f"not measured{f' ({reason})' if reason else ''}", *[""] * 6)
    losses = list(run["losses"].values())
    return (
        f"{fixed(run['step_ms'], 0)} ms",
        times(run["step_ms"] / ours) if ours else "",
        f"{run['tokens_per_second']:,}",
        gib({"peak_GiB": run["peak_GiB"] + run.get("graphs_GiB", 0)}) if "peak_GiB" in run else "",
        "" if run["first_step_seconds"] is None else f"{fixed(run['first_step_seconds'], 0)} s",
        ", ".join(fixed(x, 3) for x in (losses[0], losses[-1])) if losses else "",
        "yes" if run["padding_free"] else "no",
    )


def claim(ratios: list[tuple], short: bool = False) -> str:
    """The ratios that were measured, with nothing about a cell without one."""
    if not ratios:
        return "no comparison yet" if short else "No tool was measured beside this package yet."
    kinds = dict.fromkeys(kind for kind, _, _ in ratios)
    texts = []
    for name in kinds:
        spans = {}
        for _, tool, ratio in (found for found in ratios if found[0] == name):
            spans.setdefault(tool, []).append(ratio)
        text = ", ".join(f"{TOOLS[tool]} {span(found)}" for tool, found in spans.items())
        texts.append(f"with {name}: {text}" if name else text)
    text = "; ".join(texts)
    return f"time over ours: {text}" if short else f"Time of a whole training step over ours, without FP8: {text}."


def span(ratios: list[float]) -> str:
    return f"{fixed(min(ratios), 2)} to {times(max(ratios))}" if len(ratios) > 1 else times(ratios[0])


def earlier(runs: list[dict]) -> list[str]:
    """Runs of the same tool in the same cell, whose steps the table does not state."""
    last, texts = {}, []
    for run in runs:
        key = cell(run)
        if (before := last.get((key, run["tool"], run["caches"]))) is not None:
            texts.append(
                f"An earlier run of *{label(run['tool'], before)}* in the cell {title(key)} took "
                f"{fixed(before['step_ms'], 0)} ms: the choice of graphs depends on the host at that time."
            )
        last[key, run["tool"], run["caches"]] = run
    return texts


def halves(runs: list[dict]) -> list[str]:
    """Runs with several forwards per step, whose first step the table states."""
    names = sorted({TOOLS[run["tool"]] for run in runs if run.get("forwards_per_step", 1) > 1})
    if not names:
        return []
    return [
        f"""The first step of {", ".join(names)} comes from a run with two forwards per step, Unsloth's default. The second one
takes less than a hundredth of it."""
    ]


def isolated(run: dict) -> bool:
    found = run.get("isolation")
    rounding = 1e-6 * found["loss"] if found and "experts" in run else 0
    return found is not None and found["changed"] <= max(found["repeated"], rounding)


def isolation(unsafe: list[str]) -> str:
    check = """After the last step, each run with `SFTTrainer` reverses the first document of a batch and reads the loss of the first tokens of the
second one. It counts as isolated if this loss changes no more than in a repetition of the same batch, or by less than a
millionth: the experts of a mixture compute the tokens of all documents together, and may round them otherwise."""
    if unsafe:
        return f"{check} **Not shown to be isolated: {', '.join(unsafe)}.**"
    return f"{check} All of these runs passed."


def shared(runs: list[dict], name: str) -> str:
    *most, last = map(str, sorted({run[name] for run in runs}) or ["no"])
    return f"{', '.join(most)} or {last}" if most else last


def common(runs: list[dict]) -> dict[str, str]:
    """The packages that every run has in the same version."""
    first = runs[0]["versions"] if runs else {}
    return {name: at for name, at in first.items() if all(run["versions"].get(name) == at for run in runs)}


def versions(tool: str, runs: list[dict]) -> str:
    """The other packages of a tool."""
    known = common(runs)
    texts = (
        ", ".join(f"{name} {at}" for name, at in run["versions"].items() if name not in known)
        for run in runs
        if run["tool"] == tool
    )
    return "; ".join(dict.fromkeys(texts))
