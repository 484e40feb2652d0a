"""The page of training in FP8: steps, and the loss."""

from card import FLOAT8, FLOAT8_AGAIN, PRODUCTS, TORCHAO, Card, fixed, gib, ms, on_gpu, percent, table, times
from steps import LENGTHS, SHAPE, setting


NAMES = {"bf16": "bf16", "float8": "FP8"}
ARMS = {
    "ours": "bf16",
    "ours+float8": "FP8",
    "ours+lora": "LoRA, bf16",
    "ours+lora+float8": "LoRA, FP8",
    "ours+lora+float8base": "LoRA, FP8, base stored in FP8",
}


def float8(results: dict) -> Card:
    steps_of = results["float8.json"]["runs"]
    lines, gains = [], {}
    for run in steps_of:
        first = next(iter(run["arms"].values()))["median_ms"]
        for name, arm in run["arms"].items():
            gains[run["model"], name] = first / arm["median_ms"]
            shape = f"{run['model']}, {run['tokens']:,} tokens"
            lines.append((shape, ARMS[name], ms(arm), times(first / arm["median_ms"]), gib(arm)))
    large = next(run for run in steps_of if run["model"] == "9B")["arms"]
    runs = results["float8_loss.json"]["runs"]
    base = next(run for run in runs if run["arm"] == "bf16")
    fp8 = next(run for run in runs if run["arm"] == "float8" and run["order"] == base["order"])
    other = next(run for run in runs if run["arm"] == "bf16" and run["order"] != base["order"])
    rows = [
        (
            NAMES[run["arm"]],
            run["order"],
            loss(run, "mean_loss_of_last_steps"),
            change(run, base, "mean_loss_of_last_steps"),
            loss(run, "held_out_loss"),
            change(run, base, "held_out_loss"),
        )
        for run in runs
    ]
    header = ("Products", "Order", "Training loss", "Over the first run", "Held-out loss", "Over the first run")
    steps, tokens = base["steps"], base["tokens"]
    (others,) = results["float8_torchao.json"]["runs"]
    (torchao,) = others["arms"].values()
    ours = next(
        arm
        for run in steps_of
        for name, arm in run["arms"].items()
        if name == "ours+float8" and run["model"] == others["model"]
    )
    alone = results["float8_products.json"]["runs"]
    rounding = spread(
        [x["rounding_of_casts"] for run in alone for y in run.get("layers", {}).values() for x in y.values()]
    )
    return Card(
        "FP8",
        f"A step of the 9B shape takes {ms(large['ours+float8'])} with FP8 and {ms(large['ours'])} in bf16. The held-out loss "
        f"after {steps:,} steps of the {base['model']} shape is {loss(fp8, 'held_out_loss')} with FP8 and "
        f"{loss(base, 'held_out_loss')} in bf16.",
        [
            f"{SHAPE} All variants are the class of this package on a packed row. {LENGTHS}",
            table(("Shape", "Products", "Time", "Speed", "Peak memory"), lines),
            """FP8 takes the layers that `use_float8` chooses by default. At 0.8B, a row of 16,384 tokens is long enough for the
largest projections only.""",
            """Weights are cast in each forward and backward, which the times include. LoRA has rank 16 on all linear layers.
Its base is in bfloat16 and is cast in the same way, or torchao has stored it in FP8.""",
            f"""torchao's `Float8Linear` with a scale per row, on the same layers of the stock class with Liger, takes
{ms(torchao)} and {gib(torchao)} for the step of {others["model"]} without `torch.compile`, {times(torchao["median_ms"] / ours["median_ms"])}
the time of this package's FP8 step. It ran on another machine with an H200, with Transformers
{results["float8_torchao.json"]["versions"]["transformers"]}. With `torch.compile` on each layer it has not run yet.""",
            setting(),
            "## Accumulation",
            """Products accumulate fast (`use_fast_accum=True`): their sums are exact only in parts. The table adds up the three
products of each layer of a kind, without casts. Errors are those of the sum and of the output in bf16, which alone rounds by
0.17 %.""",
            table(
                ("Shape", "bf16", "FP8, fast", "FP8, exact", "Error, fast", "Error, exact"),
                [products(run) for run in alone if "layers" in run],
            ),
            f"""The cast of the operands rounds by {rounding}, ten times as much. For this reason, and because the loss below is
that of bf16, products accumulate fast.""",
            "## Experts",
            """Grouped products of experts stay in bf16. An expert gets few rows, so the cast of its weight takes longer than
the product saves. These are the products of the forward at 16,384 tokens. The gradients need the weights once more, cast and
transposed.""",
            table(
                ("Shape", "Weight", "bf16", "FP8", "Cast of rows", "Cast of weights", "FP8 with casts"),
                [row for run in alone if "experts" in run for row in grouped(run)],
            ),
            "## Loss",
            f"""Another order of the documents changes the held-out loss of bf16 by {change(other, base, "held_out_loss")}, and FP8
by {change(fp8, base, "held_out_loss")}.""",
            table(header, rows),
            "![Loss over the steps in bf16, with FP8 and in bf16 with another order, and the differences](../figures/float8_loss.svg)",
            f"""The training loss is the mean of the last 100 steps, and the held-out loss that of {base["held_out_rows"]} rows after
training. The held-out rows are the same in each run. Runs of the same order also share their training rows.
The training losses of two orders are means over different rows. The second bf16 order shows the spread of the loss without FP8.""",
            f"""The model is our class with the layers of the {base["model"]} shape, a vocabulary of {base["vocab_size"]:,} and
{fixed(base["parameters"] / 1e6, 0)} million random weights in float32, the same in each run. It trains under bf16 autocast.
With FP8, `use_float8` takes {fp8["float8_layers"]} linear layers. The first and the last decoder layer, `in_proj_a`,
`in_proj_b` and the head stay in bf16.""",
            f"""A step is one packed row of {tokens:,} tokens. AdamW has betas of 0.9 and 0.95 and decays matrices by 0.1. Gradients are
clipped to a norm of 1. The learning rate rises to {base["lr"]:g} in {base["warmup"]} steps and falls to a tenth along a
cosine.""",
            f"""The text is Python code of the standard library and of installed packages, which every machine has. Documents have at
most 2,048 tokens of a byte-level BPE. A run sees {fixed(steps * tokens / 1e6, 1)} million tokens, and none of them twice.""",
        ],
        ["float8.json", "float8_products.json", "float8_torchao.json", "float8_loss.json"],
        **on_gpu(results, "float8.json"),
        commands=[run["command"] for run in (*steps_of, *alone, others, *runs)],
        committed=[FLOAT8, FLOAT8_AGAIN, PRODUCTS, TORCHAO],
        number=f"9B {times(gains['9B', 'ours+float8'])} as fast; loss {change(fp8, base, 'held_out_loss')}",
    )


def products(run: dict) -> tuple:
    """All products of one of each layer: their time in bf16, and in float8 with fast and with exact accumulation."""
    every = [entry for kinds in run["layers"].values() for entry in kinds.values()]
    totals = (sum(entry[f"{name}_ms"] for entry in every) for name in ("bf16", "fast", "exact"))
    errors = (spread([entry[f"{name}_error"] for entry in every]) for name in ("fast", "exact"))
    return (run["model"], *(f"{fixed(total, 1)} ms" for total in totals), *errors)


def spread(values: list[float]) -> str:
    low, high = (fixed(100 * x, 2) for x in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def grouped(run: dict) -> list[tuple]:
    """The experts' products of the forward, and with the casts that they need in float8."""
    rows = []
    for name, entry in run["experts"].items():
        casts = entry["cast_of_weight_ms"] + entry["cast_of_rows_ms"]
        times_of = (entry["bf16_ms"], entry["float8_ms"], entry["cast_of_rows_ms"], entry["cast_of_weight_ms"])
        cells = (f"{fixed(ms, 2)} ms" for ms in (*times_of, entry["float8_ms"] + casts))
        rows.append((run["model"], f"`{name}`", *cells))
    return rows


def loss(run: dict, key: str) -> str:
    return fixed(run[key], 4)


def change(run: dict, base: dict, key: str) -> str:
    """The difference in percent, with its sign."""
    if run is base:
        return ""
    share = run[key] / base[key] - 1
    return f"{'+' if share >= 0 else '−'}{percent(abs(share), 2)}"
