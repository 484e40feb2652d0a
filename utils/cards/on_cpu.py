"""Pages of figures of a CPU."""

from card import CPU, PLANS, PLANS_AGAIN, Card, fixed, percent, small, table


def cpu_machine(results: dict, name: str) -> dict:
    machine = results[name]["machine"]
    return {"machine": f"{machine['cpu']}, {machine['cores']} cores", "versions": results[name]["versions"]}


def cpu_step(results: dict) -> Card:
    data = results["cpu_step.json"]
    measured, tokens, lengths = data["results"], data["tokens"], data["lengths"]
    rows = [
        (
            label,
            f"{tokens[count]:,}",
            f"{measured['median_seconds'][arm]:.2f}",
            f"{measured['real_tokens_per_second'][arm]:.0f}",
        )
        for label, count, arm in (("padded, stock class", "padded", "padded"), ("packed, ours", "real", "packed"))
    ]
    config = data["model"]["config"]
    return Card(
        "A step on a CPU",
        f"On one CPU thread packed rows train {measured['ratio']:.2f} x as fast as padded batches, where padding alone accounts for "
        f"{tokens['padded'] / tokens['real']:.2f} x.",
        [
            f"""The same samples go through the same weights, forward and backward in float32, in batches of {lengths["batch_size"]}. Lengths are
{lengths["distribution"]} (many short, few long) with a mean of {lengths["mean"]} and at most {lengths["max"]:,} tokens. The model is Qwen3.5 with {config["num_hidden_layers"]} layers
and a hidden size of {config["hidden_size"]}. Padded batches and packed rows take turns.""",
            table(("", "Computed tokens", "Seconds", "Real tokens/s"), rows),
            """The reference of the gated delta rule in this package repeats no heads and avoids denormal numbers, which saves time
beyond the padding.""",
            f"""Both losses agree to {small(measured["largest_relative_loss_difference"])} relative, which is rounding in float32. The ratio in the repeats was
{", ".join(f"{ratio:.2f}" for ratio in measured["ratio_in_each_repeat"])}.""",
        ],
        ["cpu_step.json"],
        **cpu_machine(results, "cpu_step.json"),
        commands=[data["command"]],
        committed=[CPU],
        number=f"{measured['ratio']:.2f} x as fast as padded batches",
        extra=[("Threads", str(data["machine"]["torch_threads"]))],
    )


PACKERS = {
    "plan_packing": "`plan_packing`",
    "plan_packing, 64 ranks": "`plan_packing` for 64 ranks",
    "plain best-fit decreasing": "plain best-fit decreasing",
    "trl.pack_dataset, bfd": 'TRL `pack_dataset(strategy="bfd")`',
    "binpacking, windows of 1,000": "`binpacking`, windows of 1,000 lengths",
}


def planning(results: dict) -> Card:
    data = results["packing.json"]
    rows = [
        (title, fixed(data["speed"][name]["seconds"], 2), percent(data["speed"][name]["fill"], 2))
        for name, title in PACKERS.items()
    ]
    fills = [(name, percent(fill["plan_packing"], 2)) for name, fill in data["fill"].items()]
    ours, huge = data["speed"]["plan_packing"], data["huge"]
    runs, count = sorted(ours["seconds_of_each_run"]), data["lengths"].split()[0]
    faster = data["speed"]["trl.pack_dataset, bfd"]["seconds"] / ours["seconds"]
    return Card(
        "Planning packed rows",
        f"`plan_packing` plans {count} documents in {ours['seconds']:.2f} s, {faster:.0f} x as fast as TRL, and fills "
        f"{percent(ours['fill'], 2)} of the rows.",
        [
            f"""Planning assigns documents to rows. *Fill* is the share of the rows' tokens that belong to documents. The lengths are
lognormal, with many short and few long documents: {data["lengths"].replace(" lognormal,", " lengths,")}.""",
            table((f"{count} lengths, rows of {data['max_length']:,} tokens", "Seconds", "Fill"), rows),
            f"""All packers run on one core. `plan_packing` has the best of {len(runs)} runs ({fixed(runs[0], 2)} to {fixed(runs[-1], 2)} s),
the others one run each. `binpacking` runs on windows of 1,000 lengths, as ms-swift and
Twinkle call it. TRL also copies the tokens, here one byte each.""",
            f"""{huge["samples"]:,} lengths take {huge["seconds"]:.0f} s and {huge["peak_GiB"]} GiB. They give {huge["rows"]:,} rows, {percent(huge["fill"], 2)} full.""",
            "## Fill by distribution",
            """*Bimodal* mixes short and long documents, and *nearly the cap* has documents little shorter than a row.
`benchmarks/packing.py` has the parameters of these distributions. Each fill equals that of plain
best-fit decreasing over all samples.""",
            table(("Lengths", "Fill"), fills),
        ],
        ["packing.json"],
        **cpu_machine(results, "packing.json"),
        commands=[data["command"]],
        committed=[PLANS_AGAIN],
        number=f"{ours['seconds']:.2f} s for {count} documents, {percent(ours['fill'], 2)} full",
    )


def balance(results: dict) -> Card:
    data = results["packing.json"]["balance"]
    rows = [
        (
            f"Qwen3.5 {name}",
            percent(run["imbalance"], 1),
            percent(run["imbalance without balance"], 1),
            percent(run["imbalance of TRL's rows in random order"], 1),
            f"{run['variance against samples in random order']:.1f}",
            f"{run['variance of TRL' + chr(39) + 's rows against samples in random order']:.1f}",
        )
        for name, run in data.items()
    ]
    timed = results["row_cost.json"]
    weight = ", ".join(f"{run['weight']:.1f} times as long in {run['model']}" for run in timed["runs"])
    worst = max(run["imbalance"] for run in data.values())
    theirs = max(run["imbalance of TRL's rows in random order"] for run in data.values())
    return Card(
        "Balance over ranks",
        f"Averaged over all steps, the slowest rank computes at most {percent(worst, 1)} longer than the mean rank, against "
        f"{percent(theirs, 1)} with TRL's rows in random order.",
        [
            """Each rank, or process, computes one row per step. *Slowest rank* is its extra time over the mean rank of the step, averaged
over all steps. *Variance* is that of the mean document length of a step, over
the variance with samples in random order: 1 equals a random mix.""",
            table(
                (
                    "Model, ranks",
                    "Slowest rank, ours",
                    "ours without balance",
                    "TRL's rows shuffled",
                    "Variance, ours",
                    "Variance, TRL",
                ),
                rows,
            ),
            "The data are those of [planning](planning.md). The [cost model](../explained/cost_model.md) predicts the times; no model ran.",
            f"""An operation of scores and values takes longer than one of a projection: in forward and backward of rows with the same number
of tokens on an {timed["machine"]}, {weight}. The cost model counts it three times.""",
        ],
        ["packing.json", "row_cost.json"],
        **cpu_machine(results, "packing.json"),
        commands=[results["packing.json"]["command"], timed["command"]],
        committed=[PLANS_AGAIN],
        number=f"slowest rank at most {percent(worst, 1)} over the mean, TRL {percent(theirs, 1)}",
    )


def dataset_cost(results: dict) -> Card:
    data = results["packing_data.json"]
    measured = data["results"]
    rows = [
        (
            title,
            f"{measured[name]['reading_seconds']:.4f}",
            f"{measured[name]['rows_seconds']:.4f}",
            f"{measured[name]['microseconds_per_row']:.1f}",
        )
        for name, title in (("datasets.Dataset", "`datasets.Dataset`"), ("list", "list in memory"))
    ]
    repeats = data["command"].partition("--repeats ")[2]
    arrow, stream = measured["datasets.Dataset"], measured["stream over a list"]
    return Card(
        "Cost of packing a dataset",
        f"`PackingDataset` adds {percent(arrow['share_of_packing'], 1)} to the time of reading a `datasets.Dataset`; a stream is packed at "
        f"{round(stream['samples_per_second'], -4):,} samples per second.",
        [
            table(("Source", "Reading samples, s", "Reading rows, s", "Microseconds per row"), rows),
            f"""Both times are for the same {data["samples"]["dataset"]:,} samples in the same order, in rows of at most {data["max_length"]:,} tokens; the last column is their
difference per row. A list hands out
references, so its last column shows the cost of a row in itself. Each figure is the best of {repeats} runs.""",
            f"""`IterablePackingDataset` over a list of {data["samples"]["stream"]:,} samples fills {percent(stream["fill"], 1)} of its rows with a buffer of
{stream["buffer_size"]} open rows.""",
        ],
        ["packing_data.json"],
        **cpu_machine(results, "packing_data.json"),
        commands=[data["command"]],
        committed=[PLANS],
        number=f"{percent(arrow['share_of_packing'], 1)} more time to read; {round(stream['samples_per_second'], -4):,} samples/s from a stream",
    )
