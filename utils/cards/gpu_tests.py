"""Pages of two GPUs, of accuracy and isolation on a GPU, and of what was tried."""

import sys

from card import (
    AUDIT,
    AUDIT_FLA,
    GPU_TESTS,
    GPU_TESTS_FIRST,
    LONG_DOCUMENTS,
    RANKS,
    TRIED,
    Card,
    gib,
    ms,
    on_gpu,
    percent,
    small,
    table,
)


WAYS = {
    "whole": "each GPU computes a row of its own",
    "state+gather": 'two share a row: `"state"` and `"gather"` (the default for this shape)',
    "state+heads": 'two share a row: `"state"` and `"heads"`',
    "heads+gather": 'two share a row: `"heads"` and `"gather"`',
    "heads+heads": 'two share a row: `"heads"` and `"heads"`',
}


def sequence_parallel(results: dict) -> Card:
    data = results["sequence_parallel.json"]
    runs = [run for run in data["runs"] if run["documents"] > 1]
    found = {}
    for run in runs:
        for arm in run["arms"]:
            found.setdefault(arm["arm"], arm)
    whole = found["whole"]
    rows = [
        (
            title,
            ms(found[name]),
            f"{found[name]['tokens_per_second_per_gpu']:,}"
            + (
                ""
                if name == "whole"
                else f" ({percent(found[name]['tokens_per_second_per_gpu'] / whole['tokens_per_second_per_gpu'])})"
            ),
            gib(found[name]),
            f"{found[name]['loss']:.4f}",
            f"{found[name]['gradient_norm']:.4f}",
        )
        for name, title in WAYS.items()
    ]
    last = runs[1]["arms"][0]
    one = next(run for run in data["runs"] if run["documents"] == 1)
    tests = suite(results)["flash-linear-attention+flash-qla+tilelang+triton"].values()
    training = [figure for entry in tests for figure in entry["figures"] if "losses, largest" in figure]
    default = found["state+gather"]
    documents = results["long_documents.json"]
    long = [(run["tokens"], run["arms"][0]) for run in documents["runs"]]
    return Card(
        "Sequence parallelism on two GPUs",
        f"Two GPUs that share a row reach {percent(default['tokens_per_second_per_gpu'] / whole['tokens_per_second_per_gpu'])} of the tokens per second of two GPUs with a row each, and "
        f"need {gib(default)} instead of {gib(whole)} each.",
        [
            """With sequence parallelism several GPUs share a packed row. The two names in quotes are the methods of the gated delta
rule and of attention, which [long rows](../how_to/long_rows.md#how-layers-share-a-row) describe.""",
            table(
                (
                    f"4B, {runs[0]['tokens']:,} tokens in {runs[0]['documents']} documents",
                    "Time of a row",
                    "Tokens/s per GPU",
                    "Memory per GPU",
                    "Loss",
                    "Gradient norm",
                ),
                rows,
            ),
            f"""Forward and backward in bfloat16 with gradient checkpointing, no optimizer, all weights on each GPU. The last line of the
table is from another run, in which a row of its own took {ms(last)}.""",
            f"""One document of {one["tokens"]:,} tokens takes two GPUs {gib(one["arms"][0])} each. That run took {one["arms"][0]["median_ms"] / 1000:.0f} s, while another test
used the same GPUs.""",
            "## LoRA on one long document",
            table(
                ("9B, tokens of the document", "Time of a step", "Tokens/s per GPU", "Memory per GPU"),
                [
                    (
                        f"{tokens:,}",
                        f"{arm['median_ms'] / 1000:.1f} s",
                        f"{arm['tokens_per_second_per_gpu']:,}",
                        gib(arm),
                    )
                    for tokens, arm in long
                ],
            ),
            """Two GPUs share the document with `"heads"` and `"heads"`. Adapters of rank 16 are on all linear layers, weights are in
bfloat16, and there is gradient checkpointing. A step is forward and backward, under autocast.""",
            "## Equality",
            f"""Over 20 steps of `accelerate launch` with FSDP2 in bfloat16, losses stay within {percent(max(f["losses, largest"] for f in training), 1)} of one GPU's and gradient norms within
{percent(max(f["grad_norms, largest"] for f in training), 2)} ([gpu_tests.json](../../benchmarks/results/gpu_tests.json)). Each op on two GPUs is about as close to the whole row in
float32 as the whole row in bfloat16 is. No bit of another document changes, also where a cut divides a document
(`tests/gpu/test_sequence_parallel.py`).""",
            """On a CPU, with 2 and 4 processes, updates equal those of one process to 1e-5 after one step and after ten, also with
images, experts and gradient checkpointing. `eval_loss` is the same, and no document changes another by a bit. A
checkpoint continues on another number of processes if a step has as many rows as before (`pytest -m slow tests/parallel`).""",
        ],
        ["sequence_parallel.json", "long_documents.json", "gpu_tests.json"],
        machine=f"two {data['machine']}s",
        versions=data["versions"],
        extra=[("Versions, long documents", ", ".join(f"{k} {v}" for k, v in documents["versions"].items()))],
        commands=[run["command"] for run in [*runs, one, *documents["runs"]]],
        committed=[RANKS, LONG_DOCUMENTS],
        number=f"{percent(default['tokens_per_second_per_gpu'] / whole['tokens_per_second_per_gpu'])} of the tokens per second of separate rows",
    )


def suite(results: dict) -> dict:
    return results["gpu_tests.json"]


def outcome(entry: dict) -> str:
    counts = entry["outcome"]
    return (
        counts if isinstance(counts, str) else ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    )


def gpu_tests(results: dict) -> Card:
    figures = [figure for runs in suite(results).values() for entry in runs.values() for figure in entry["figures"]]
    largest = lambda name, *parts, without=(): max(  # noqa: E731
        figure[name]
        for figure in figures
        if isinstance(figure.get(name), float)
        and all(part in figure["test"] for part in parts)
        and not any(part in figure["test"] for part in without)
    )
    models = [figure for figure in figures if "logits" in figure]
    half = [figure for figure in models if "float32 (" not in figure["test"]]
    single = [figure for figure in models if "float32 (" in figure["test"]]
    worst = lambda chosen, name: max(figure.get(name, 0) for figure in chosen)  # noqa: E731
    hooked = [figure for figure in figures if "each module hooked" in figure["test"]]
    fused = [figure for figure in figures if "triton" in figure and "bfloat16" in figure["test"]]
    graphs = [
        value
        for figure in figures
        if "graphs" in figure["test"]
        for name, value in figure.items()
        if name.endswith("gradients") and isinstance(value, float)
    ]
    leaks = [figure for figure in figures if "others" in figure]
    if {(figure["others"], figure["gradients"]) for figure in leaks} != {("bit for bit the same", "exactly 0 across")}:
        sys.exit("gpu_tests.json: a test of isolation found a difference; the card has no words for that")
    kernel = [
        (name, largest("output", name, "bfloat16", without=["reference", "per_document"]))
        for name in ("gated_delta_rule", "causal_conv1d", "varlen_attn", "flex_attention)")
    ]
    rows = [
        ("whole models, bfloat16: a document's logits", f"{small(worst(half, 'logits'))}"),
        ("whole models, bfloat16: all gradients together", f"{small(worst(half, 'gradients'))}"),
        ("the same with a hook on each module: gradients", f"{small(worst(hooked, 'gradients'))}"),
        (
            "whole models, float32 (PyTorch reference of the delta rule)",
            f"{small(max(worst(single, 'logits'), worst(single, 'gradients')))}",
        ),
        *(
            (
                f"`{name.strip(')')}` kernels, bfloat16, 65,536 tokens in 1, 34 and 1,000 documents: output",
                f"{small(value)}",
            )
            for name, value in kernel
        ),
        ("fused Triton kernels, bfloat16, 1 to 65,536 tokens", f"{small(max(f['triton'] for f in fused))}"),
        ("CUDA graphs against no graphs: gradients (losses are equal to the bit)", f"{small(max(graphs))}"),
    ]
    entries = [(kernels, name, entry) for kernels, runs in suite(results).items() for name, entry in runs.items()]
    runs = [
        (
            kernels.replace("+", ", "),
            f"`{name.removeprefix('python -m ').replace('|', chr(92) + '|')}`",
            outcome(entry),
        )
        for kernels, name, entry in entries
    ]
    machine = entries[0][2]["machine"]
    versions = {}
    for _, _, entry in entries:
        for name, version in entry["machine"].items():
            if name != "gpu" and version not in versions.setdefault(name, []):
                versions[name].append(version)
    return Card(
        "Accuracy on a GPU",
        f"In bfloat16 on a GPU each document's logits stay within {small(worst(half, 'logits'))} of float32 on the CPU, all gradients together "
        f"within {small(worst(half, 'gradients'))}, and no other document's logits change by a bit.",
        [
            table(("Largest relative error", ""), rows),
            """Whole models are compared with float32 on the CPU, where each document runs alone. Kernels are compared with their
PyTorch reference. The fused Triton kernels are compared with float64 from 1 to 65,536 tokens and at the end of a row of 262,144; a
repeated run gives the same bits. A hook on a module turns off the fused ops that replace the module, and its row
of the table compares layers with and without them.""",
            f"""**Isolation.** In {len(leaks)} comparisons of ops and models, changing one document left all others bit for bit the same, and
gradients across documents were exactly zero.""",
            "**Host syncs.** Forward and backward of a new row wait for the GPU nowhere.",
            "## Test runs",
            table(("Kernels installed", "Tests", "Outcome"), runs),
            """One test failed with tilelang installed, and the JSON does not name it. With tilelang, flash-linear-attention's backward
reads past the end of a document and multiplies by zero: finite values cannot cross, but a NaN reaches the gradients of
the document before it. The kernel tests use finite values for that combination. FlashQLA, which has priority, does not
do this, nor does flash-linear-attention with triton 3.7.1 and without tilelang (`FLA_TILELANG=0`).""",
            "`make test-gpu` runs the tests on your machine and writes this JSON.",
        ],
        ["gpu_tests.json"],
        machine=f"one {machine['gpu']} (two for DistributedDataParallel and sequence parallelism)",
        versions={name: " and ".join(found) for name, found in versions.items()},
        commands=["make test-gpu"],
        committed=[GPU_TESTS_FIRST, GPU_TESTS],
        number=f"logits {small(worst(half, 'logits'))}, gradients {small(worst(half, 'gradients'))} in bfloat16",
    )


def across(matrix: list[list[float]] | None) -> float:
    """The largest influence of a document on another one."""
    return max((x for i, row in enumerate(matrix or []) for j, x in enumerate(row) if i != j), default=0.0)


def audit_gpu(results: dict) -> Card:
    data = results["audit_gpu.json"]
    rows, ours = [], []
    for kernels, group in data.items():
        for run in group["results"]:
            report = run["report"]
            source = report["sources"]["position_ids"]
            is_ours = report["model"].startswith("transformers_packed")
            ours += (
                [across(x[name]) for x in report["sources"].values() for name in ("influence", "backward")]
                if is_ours
                else []
            )
            everything = report["sources"]["all"]
            rows.append(
                (
                    run["model"],
                    "ours" if is_ours else "stock",
                    "FlashQLA" if "flash-qla" in kernels else "flash-linear-attention",
                    f"{source['verdict']} ({across(source['influence']):.1f}, {across(source['backward']):.1f})",
                    everything["verdict"],
                )
            )
    if any(ours):
        sys.exit("audit_gpu.json: one of our models leaks; the card has no words for that")
    last = data["flash-linear-attention+flash-qla+triton"]
    refused = next(
        run["report"]["sources"]["all"]["reason"]
        for run in last["results"]
        if run["report"]["sources"]["all"]["verdict"] == "refused"
    )
    return Card(
        "Audit on a GPU",
        "In bfloat16 on a GPU no bit of another document's logits or gradients changes in our models, where the stock classes leak.",
        [
            """The [audit](../how_to/audit.md) changes one document of a packed row after the other. *Ours* is the class of this
package, *stock* that of Transformers. One column passes `position_ids` that restart in every document, the other
*all boundaries* that the collator can give. *Leaks* means that documents change each other, *refused* that the model raises an error.
The brackets hold the largest relative change of another document's token, and the largest gradient that reaches
another document.""",
            table(
                ("Shape", "Class", "Delta rule", "`position_ids` (forward, backward)", "all boundaries"),
                rows,
            ),
            f"The stock classes refuse all boundaries: {refused}",
            """Shapes are those of Qwen3.5 0.8B and, with small experts, Qwen3.5-MoE and Qwen3-Next, on random weights. The runs with
flash-linear-attention did not fuse gates and norms with the linear layers behind them.""",
        ],
        ["audit_gpu.json"],
        machine=f"one {last['machine']['gpu']}",
        versions={name: version for name, version in last["machine"].items() if name != "gpu"}
        | {"triton with flash-linear-attention alone": data["flash-linear-attention+triton"]["machine"]["triton"]},
        commands=[group["command"] for group in data.values()],
        committed=[AUDIT_FLA, AUDIT],
        number="largest change of another document, ours: exactly 0; stock: " + " to ".join(stock_range(data)),
    )


def stock_range(data: dict) -> tuple[str, str]:
    found = [
        across(run["report"]["sources"]["position_ids"]["influence"])
        for group in data.values()
        for run in group["results"]
        if not run["report"]["model"].startswith("transformers_packed")
    ]
    return f"{min(found):.2f}", f"{max(found):.2f}"


def tried(results: dict) -> Card:
    data = results["tried.json"]
    convolution = [run for run in data["convolution"] if run["value_heads"] == 16]
    kept = next(run for run in convolution if run["form"] == "kept")
    rows = [
        (
            run["form"],
            run.get("tokens", ""),
            run.get("unrolled", ""),
            run.get("registers", ""),
            run.get("heads_of_a_program", ""),
            run["forward_us"],
            run["backward_us"],
        )
        for run in convolution
    ]
    plain = next(run for run in data["steps"] if not run["graphs"])
    graphs = [
        (
            "no graphs" if not run["graphs"] else f"graph with room for {run['documents_of_a_graph']} documents",
            "" if not run.get("longest_document_told") else f"{run['longest_document_told']:,} tokens",
            f"{run['median_ms']:.1f}",
            f"{run['kernels_ms']:.1f}",
        )
        for run in data["steps"]
    ]
    best = next(
        run
        for run in convolution
        if (run["form"], run.get("tokens"), run.get("unrolled"), run.get("heads_of_a_program"))
        == ("one token ahead", 64, 1, None)
    )
    return Card(
        "Tried without gain",
        f"The best other form of the convolution takes {best['forward_us']} µs forward and {best['backward_us']} µs backward instead of {kept['forward_us']} and "
        f"{kept['backward_us']}.",
        [
            """All of these were measured at 0.8B on 16,384 tokens in 44 documents. None made a step measurably faster, so this package
uses none of them. *Kept* is the form that it uses.""",
            "## The convolution",
            """The other form loads tokens ahead of their use. It has two thirds of the instructions: no division, no subnormal numbers, and masks only where a document
begins. More tokens loaded ahead, or several heads side by side, do not make it faster. Of the kept form, 13
settings of run length, warps and registers changed backward by less than a tenth (not in the JSON). A run is the tokens that a warp computes one after the other.""",
            table(
                (
                    "Form, 16 value heads",
                    "Tokens per run",
                    "Tokens unrolled",
                    "Registers",
                    "Heads per program",
                    "Forward, µs",
                    "Backward, µs",
                ),
                rows,
            ),
            "## CUDA graphs of long rows",
            f"""With the number of documents and the longest length known to the graph, its kernels take about as long as the {plain["kernels_ms"]:.1f} ms
without graphs, and never less.""",
            table(("", "Longest document given", "Step, ms", "Kernels, ms"), graphs),
            "## Matrix products",
            """Three changes gave nothing (not in the JSON): one product for the two projections of an MLP, from a joined copy of
their weights (equal within noise at 0.8B, slower at 4B); transposed copies of weights for the gradients' products;
`cublasLt` in the place of cuBLAS.""",
        ],
        ["tried.json"],
        **on_gpu(results, "tried.json"),
        commands=[
            "# One-off scripts; the kept form is measured by:",
            "python benchmarks/step.py --models 0.8B --tokens 16384 --arms ours --profile",
        ],
        committed=[TRIED],
        number="convolution, graphs of long rows, matrix products",
    )
