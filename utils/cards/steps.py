"""Pages of step times and memory on one GPU."""

from card import (
    GRAPHS,
    GRAPHS_AGAIN,
    ROOMS,
    STEPS,
    TRIED,
    UNTOUCHED,
    Card,
    against,
    compared,
    fixed,
    gib,
    ms,
    on_gpu,
    percent,
    step_runs,
    table,
    times,
)


SHAPE = "A shape, such as 0.8B, has the layer sizes of the Qwen3.5 model of that name and random weights."
LENGTHS = "Document lengths are lognormal (many short, few long) with a mean of 480 tokens."
NOISE = """The host is shared: its share of a step differs by a third from minute to minute, and short rows show this most."""
STOCK = {
    "packed": "*stock, packed* is Transformers' own class on the same row",
    "padded": "*stock, padded* is that class on padded batches of 8 documents",
}
KERNELS = {
    "packed": """The stock class on a packed row gets Liger, FlashQLA, flash-linear-attention's convolution and torch's `varlen_attn`,
which Transformers does not offer by itself.""",
    "padded": "On padded batches it gets Liger and SDPA.",
}


def arms(*stock: str) -> str:
    """The names of a table, for the paragraph before it."""
    *first, last = ["*Ours* is the class of this package on a packed row", *(STOCK[arm] for arm in stock)]
    return f"{SHAPE} {', '.join(first)}, and {last}." if first else f"{SHAPE} {last}."


def setting(*stock: str) -> str:
    """The conditions of a measurement with these arms of the stock class."""
    same = ["All variants get the same samples and weights, and take turns."] if stock else []
    parts = [
        "A step is forward and backward in bfloat16, without an optimizer.",
        *same,
        *(KERNELS[arm] for arm in stock),
    ]
    return " ".join(
        [
            *parts,
            "Steps follow one another as in training, and CUDA events take the times.",
            "Each figure is the median after a warm-up.",
        ]
    )


def step_time(results: dict) -> Card:
    small, large = (compared(results, model, 16_384) for model in ("0.8B", "4B"))
    largest = step_runs(results, "9B", 16_384)[-1]
    ours = small["arms"]["ours"]
    rows = [
        (f"{run['model']}, {run['documents']} documents", f"{ms(run['arms']['ours'])}, {gib(run['arms']['ours'])}")
        + tuple(against(run, arm) for arm in ("packed+varlen+liger", "padded+liger"))
        for run in (small, large, largest)
    ]
    again = {
        model: sorted(
            run["median_ms"]
            for part in ("before", "after")
            for name in (("rooms.json", "untouched_modules.json") if model == "0.8B" else ("rooms.json",))
            for run in picked(results[name]["runs"], model)[part]
        )
        for model in ("0.8B", "4B")
    }
    shares = table(
        ("Shape", "of the single product", "of the sustained product"),
        [
            (f"{run['model']}",) + tuple(shares_of(run["arms"]["ours"]))
            for run in (small, profiled(results, "4B"), largest)
        ],
    )
    body = [
        f"""{arms("packed", "padded")} {LENGTHS} A cell holds the time of a step, in brackets its ratio to ours, and the peak
memory.""",
        table(("Shape", "Ours", "Stock, packed", "Stock, padded"), rows),
        "![Milliseconds per step: ours, stock packed and stock padded](../figures/speed.svg)",
        setting("packed", "padded"),
        f"""{NOISE} Later runs of the same row, medians of 10 to 20 steps, took {again["0.8B"][0]:.0f} to
{again["0.8B"][-1]:.0f} ms at 0.8B ({len(again["0.8B"])} processes) and {again["4B"][0]:.0f} to {again["4B"][-1]:.0f} ms at
4B ({len(again["4B"])} processes).""",
        """The 0.8B run passed 4,096 tokens at a time through the language model head, the others 3,072. The JSON does not hold these
sizes. The difference in time is within the noise.""",
        "## Share of the GPU's speed",
        f"""A single matrix product reached {small["gemm_flops_per_second"] / 1e12:.0f} TFLOP/s before the 0.8B run. Repeated for a
second before the 4B run, it reached {profiled(results, "4B")["sustained_gemm_flops_per_second"] / 1e12:.0f}, because the power limit lowers the
clock. The model's FLOPs per second, as a share of both:""",
        shares,
        f"""The 9B run measured its single product on a warm GPU, at {largest["gemm_flops_per_second"] / 1e12:.0f} TFLOP/s; of
{small["gemm_flops_per_second"] / 1e12:.0f} its share is {percent(largest["arms"]["ours"]["share_of_gemm_rate"] * largest["gemm_flops_per_second"] / small["gemm_flops_per_second"])}. The 4B shares come from the profiled run.""",
    ]
    packed, padded = (small["arms"][arm]["median_ms"] / ours["median_ms"] for arm in list(small["arms"])[1:])
    return Card(
        "Step time at 16,384 tokens",
        f"A step of the 0.8B shape takes {ms(ours)}: {times(packed)} as fast as the stock class on the same packed row, "
        f"{times(padded)} as fast as on padded batches.",
        body,
        ["step.json", "rooms.json", "untouched_modules.json"],
        **on_gpu(results),
        commands=[run["command"] for run in (small, large, largest)]
        + [results["rooms.json"]["command"], results["untouched_modules.json"]["command"]],
        committed=[STEPS, ROOMS, UNTOUCHED],
        number=f"0.8B: {ms(ours)}, {times(packed)} as fast as stock packed, {times(padded)} as padded; 4B: {ms(large['arms']['ours'])}, "
        f"{times(large['arms']['packed+varlen+liger']['median_ms'] / large['arms']['ours']['median_ms'])}",
    )


def picked(runs: dict, model: str) -> dict:
    return runs.get(model, runs)


def shares_of(arm: dict) -> tuple[str, str]:
    return percent(arm["share_of_gemm_rate"]), percent(arm["share_of_sustained_gemm_rate"])


def profiled(results: dict, model: str) -> dict:
    return next(run for run in step_runs(results, model, 16_384) if "profile_ms" in run["arms"]["ours"])


def equal_documents(results: dict) -> Card:
    run = compared(results, "0.8B", 16_384, "equal")
    ours, padded = run["arms"]["ours"], run["arms"]["padded+liger"]
    packed = run["arms"]["packed+varlen+liger"]
    ratios = [times(arm["median_ms"] / ours["median_ms"]) for arm in (packed, padded)]
    rows = [
        ("ours", ms(ours), gib(ours), ""),
        ("stock, packed", ms(packed), gib(packed), ratios[0]),
        ("stock, padded", ms(padded), gib(padded), ratios[1]),
    ]
    return Card(
        "Documents of 512 tokens",
        f"With {run['documents']} documents of {run['tokens'] // run['documents']} tokens, where batches contain no padding, a step takes {ms(ours)} against "
        f"{ms(packed)} packed and {ms(padded)} padded with the stock class.",
        [
            arms("packed", "padded"),
            table((f"0.8B, {run['tokens']:,} tokens", "Time", "Memory", "Time over ours"), rows),
            """Documents of equal length leave batches without padding, so the difference is the speed of the layers. *Stock, padded*
also runs the layers four times, once for each batch of 8 documents.""",
            setting("packed", "padded"),
        ],
        ["step.json"],
        **on_gpu(results),
        commands=[run["command"]],
        committed=[STEPS],
        number=f"{ms(ours)}, {ratios[0]} as fast as stock packed, {ratios[1]} as padded",
    )


def short_rows(results: dict) -> Card:
    runs = step_runs(results, "0.8B", 2048)
    pairs = [
        run
        for model, tokens in (("0.8B", 2048), ("0.8B", 4096), ("0.8B", 8192), ("0.8B", 16_384), ("4B", 2048))
        for run in step_runs(results, model, tokens)
        if "ours+graphs" in run["arms"]
    ]
    first = pairs[0]["arms"]
    stock = [
        (
            f"{index}",
            f"{run['arms']['ours']['median_ms']:.0f} ms",
            against(run, "packed+varlen+liger").split(",")[0],
            f"{run['arms']['ours+graphs']['median_ms']:.0f} ms" if "ours+graphs" in run["arms"] else "",
        )
        for index, run in enumerate((run for run in runs if "packed+varlen+liger" in run["arms"]), start=1)
    ]
    graphs = [
        (f"{run['model']}, {run['tokens']:,} tokens",)
        + tuple(fixed(run["arms"][arm]["median_ms"], 1) for arm in ("ours+graphs", "ours"))
        + tuple(gib(run["arms"][arm]) for arm in ("ours+graphs", "ours"))
        for run in pairs
    ]
    profile = profiled(results, "0.8B")["arms"]["ours"]["profile_ms"]
    tried = {
        (run["documents_of_a_graph"], run["longest_document_told"]): run
        for run in results["tried.json"]["steps"]
        if run["graphs"]
    }
    plain = next(run for run in results["tried.json"]["steps"] if not run["graphs"])
    short = [run for run in pairs if run["model"] == "0.8B" and run["tokens"] == 2048]
    host = [run["arms"]["ours"]["median_ms"] for run in runs if "ours" in run["arms"]]
    room, longest = min(key for key in tried if key[1])
    stock_ratio = first["packed+varlen+liger"]["median_ms"] / first["ours+graphs"]["median_ms"]
    return Card(
        "Short rows and CUDA graphs",
        f"With CUDA graphs a step of the 0.8B shape on 2,048 tokens takes {first['ours+graphs']['median_ms']:.0f} ms, "
        f"{times(stock_ratio)} as fast as the stock class in the same run and {times(first['ours']['median_ms'] / first['ours+graphs']['median_ms'])} "
        "as fast as without graphs.",
        [
            f"{arms('packed')} {LENGTHS}",
            table(
                (
                    f"Run, 0.8B on {runs[0]['tokens']:,} tokens in {runs[0]['documents']} documents",
                    "Ours",
                    "Stock, packed",
                    "Ours with graphs",
                ),
                stock,
            ),
            "[`use_cuda_graphs`](../how_to/short_rows.md) replays the layers as one launch for forward and one for backward. "
            "Milliseconds of a step, with and without graphs in the same run (an empty cell was not measured):",
            table(("Shape, row", "With graphs, ms", "Without, ms", "Memory with", "Memory without"), graphs),
            f"""Without graphs, the time depends on the host and differs between runs. With graphs it agrees ({" and ".join(f"{run['arms']['ours+graphs']['median_ms']:.1f}" for run in short)} ms at 2,048 tokens).""",
            "## Why short rows gain",
            f"""Without graphs, a step of the 0.8B shape on 2,048 tokens takes {min(host):.0f} to {max(host):.0f} ms. The host launches {profile["launches"]:,} kernels at 16,384 tokens
and 1,440 at 2,048. A row of 2,048 tokens, whose kernels take 30 ms, is therefore bound by the host. A count of the calls
gives 560 launches to cuBLAS and 280 to this package; the rest belong to FlashQLA, `varlen_attn` and torch. (The JSON
holds the launches at 16,384 tokens; the other figures of this paragraph come from a profile.)""",
            "## Where graphs cost",
            f"""From 8,192 tokens on the kernels take longer than their launches. A graph has room for 8, 32 or 128
documents, and launches attention as if each of them could fill the row. With 44 documents in 16,384 tokens, attention's backward takes 12.9 ms
instead of 4.2 (from a profile). A graph with room for {room} documents and a known longest document of {longest:,} tokens was tried:
its kernels took {tried[room, longest]["kernels_ms"]:.1f} ms, against {plain["kernels_ms"]:.1f} without graphs and {tried[128, None]["kernels_ms"]:.1f} in the form of this package
([tried without gain](tried.md)).""",
            """Graphs keep the activations of one row after the step, and hold the gradients of the layers twice. The memory columns
show the price.""",
            f"{setting('packed')} {NOISE}",
        ],
        ["step.json", "tried.json"],
        **on_gpu(results),
        commands=[run["command"] for run in [*runs, *pairs]],
        committed=[STEPS, GRAPHS, GRAPHS_AGAIN],
        number=f"{first['ours+graphs']['median_ms']:.0f} ms with graphs, {stock_ratio:.2f} x as fast as stock",
    )


def memory_4b(results: dict) -> Card:
    run, checkpointed = compared(results, "4B", 16_384), step_runs(results, "4B", 16_384, checkpointing=True)[-1]
    ours, stock, with_checkpointing = (
        run["arms"]["ours"],
        run["arms"]["packed+varlen+liger"],
        checkpointed["arms"]["ours"],
    )
    rows = [
        ("ours", gib(ours), ms(ours)),
        ("stock, packed", gib(stock), ms(stock)),
        ("ours, with gradient checkpointing", gib(with_checkpointing), ms(with_checkpointing)),
    ]
    return Card(
        "Memory of the 4B shape",
        f"The 4B shape needs {gib(ours)} for a row of 16,384 tokens, {stock['peak_GiB'] - ours['peak_GiB']:.1f} GiB less than the "
        "stock class.",
        [
            f"{arms('packed')} {LENGTHS}",
            table((f"4B, {run['tokens']:,} tokens in {run['documents']} documents", "Peak memory", "Time"), rows),
            "The peak includes weights and gradients in bfloat16 and no optimizer state.",
            """Backward recomputes the inputs of `down_proj`, `o_proj` and `out_proj` from the tensors that the gate, or the gated norm,
keeps anyway. At 4B and 16,384 tokens this saves 13 GiB for one more write per element (not in the JSON).""",
            """The loss holds the logits of 3,072 tokens at a time and accumulates the gradient of the head's weight in float32.
The [memory formulae](../explained/memory.md) predict these peaks.""",
            setting("packed"),
        ],
        ["step.json"],
        **on_gpu(results),
        commands=[run["command"], checkpointed["command"]],
        committed=[STEPS],
        number=f"{gib(ours)} against {gib(stock)} (stock)",
    )


def long_rows(results: dict) -> Card:
    runs = [step_runs(results, "4B", tokens, checkpointing=True)[-1] for tokens in (16_384, 262_144)]
    ours = runs[1]["arms"]["ours"]
    rows = [
        (
            f"{run['tokens']:,} tokens in {run['documents']} documents",
            f"{run['arms']['ours']['median_ms'] / 1000:.2f} s",
        )
        + (gib(run["arms"]["ours"]), f"{run['arms']['ours']['tokens_per_second']:,}")
        for run in runs
    ]
    return Card(
        "Rows of 262,144 tokens",
        f"With gradient checkpointing one GPU trains the 4B shape on a row of 262,144 tokens in {ours['median_ms'] / 1000:.1f} s "
        f"and {gib(ours)}.",
        [
            f"{arms()} {LENGTHS}",
            table(("4B, gradient checkpointing", "Time of a step", "Peak memory", "Tokens per second"), rows),
            f"The speed per token is that of the short row: {runs[1]['arms']['ours']['tokens_per_second']:,} against "
            f"{runs[0]['arms']['ours']['tokens_per_second']:,} tokens per second. For longer rows, see "
            "[several GPUs per row](sequence_parallel.md).",
            f"{setting()} These are medians of {min(len(run['arms']['ours']['seconds']) for run in runs)} steps or more.",
        ],
        ["step.json"],
        **on_gpu(results),
        commands=[run["command"] for run in runs],
        committed=[STEPS],
        number=f"{ours['median_ms'] / 1000:.1f} s, {gib(ours)}",
    )


GROUPS = {
    "matmul": "matrix products",
    "gated delta rule": "gated delta rule (FlashQLA)",
    "norms and gates": "norms and gates",
    "convolution": "convolution",
    "attention": "attention; ours includes its norms and rotary positions",
    "loss": "softmax of the loss",
    "other": "other: copies, casts, additions",
    "all kernels": "sum",
}


def profile(results: dict) -> Card:
    runs = [profiled(results, model) for model in ("0.8B", "4B")]
    columns = [run["arms"][arm]["profile_ms"] for run in runs for arm in ("ours", "packed+varlen+liger")]
    rows = [(title, *(fixed(column[name], 1) for column in columns)) for name, title in GROUPS.items()]
    tried = results["tried.json"]
    plain = next(run for run in tried["steps"] if not run["graphs"])
    share = columns[0]["matmul"] / columns[0]["all kernels"], columns[2]["matmul"] / columns[2]["all kernels"]
    return Card(
        "Where the time goes",
        f"Matrix products take {percent(share[0])} of the kernel time at 0.8B and {percent(share[1])} at 4B.",
        [
            f"{arms('packed')} {LENGTHS}",
            f"Milliseconds of kernels in a step of {runs[0]['tokens']:,} tokens in {runs[0]['documents']} documents:",
            table(("", "0.8B, ours", "0.8B, stock packed", "4B, ours", "4B, stock packed"), rows),
            """**Matrix products** bound the step. The [share of the GPU's speed](step_time.md#share-of-the-gpus-speed) that the model's
FLOPs reach counts the time of the whole step.""",
            f"""**Memory traffic** bounds most of the rest. Counted from the sizes of inputs and outputs at 4.5 TB/s, norms and gates at 4B
need 39 ms and take {columns[2]["norms and gates"]:.1f}. The convolution needs 8 ms and takes {columns[2]["convolution"]:.1f}; its bound is unknown.
[Thirteen settings and several other forms](tried.md) did not make a step measurably faster.""",
            f"""**Room for improvement** is small. At 4B these kernels could give back 25 ms, 3 % of the step. At 0.8B they could give back
4 ms of the convolution, 1.5 ms of residual additions outside of the norms and 1 ms of small sums over partial results,
together 4 %. The gaps between the {plain["kernels"]:,} kernels of a step add up to {plain["gaps_ms"]} ms. (The gaps are in tried.json; the other
estimates of these two paragraphs are counts from tensor sizes, not in a JSON.)""",
            setting("packed"),
        ],
        ["step.json", "tried.json"],
        **on_gpu(results),
        commands=[run["command"] for run in runs],
        committed=[STEPS, TRIED],
        number=f"products: {percent(share[0])} of kernel time at 0.8B, {percent(share[1])} at 4B",
    )
