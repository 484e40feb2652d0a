"""The page of steps of mixtures of experts."""

from card import EXPERTS, MOE, Card, fixed, gib, ms, on_gpu, percent, table, times
from steps import LENGTHS, setting


NAMES = {
    "ours": "ours",
    "ours+graphs": "ours, CUDA graphs",
    "ours+stock-experts": "ours, with `grouped_mm` experts",
    "ours+lora": "ours, LoRA",
    "packed+varlen+liger": "stock, packed",
    "packed+varlen+liger+lora": "stock, packed, PEFT's LoRA",
}


def moe(results: dict) -> Card:
    runs = results["moe.json"]["runs"]
    full, adapters, short, headless, next_80b = (
        next(run for run in runs if run["model"] == model and run["tokens"] == tokens and wanted(run))
        for model, tokens, wanted in (
            ("35B-A3B", 16_384, lambda run: "ours+stock-experts" in run["arms"]),
            ("35B-A3B", 16_384, lambda run: "ours+lora" in run["arms"]),
            ("35B-A3B", 2_048, lambda run: True),
            ("35B-A3B", 16_384, lambda run: "--no-head" in run["command"]),
            ("Next-80B", 16_384, lambda run: True),
        )
    )
    rows = []
    for run, layers, what in (
        (full, 8, ""),
        (adapters, 8, ""),
        (headless, 8, ", without the head"),
        (short, 8, ""),
        (next_80b, 4, ""),
    ):
        base = next(iter(run["arms"].values()))["median_ms"]
        for name, arm in run["arms"].items():
            shape = f"{run['model']}, {layers} layers, {run['tokens']:,} tokens{what}"
            above = f"{fixed(arm['peak_above_GiB'], 1)} GiB"
            rows.append((shape, NAMES[name], ms(arm), times(arm["median_ms"] / base), gib(arm), above))
    ours, stock = full["arms"]["ours"], full["arms"]["packed+varlen+liger"]
    lora, peft = adapters["arms"]["ours+lora"], adapters["arms"]["packed+varlen+liger+lora"]
    gain, lora_gain = (times(b["median_ms"] / a["median_ms"]) for a, b in ((ours, stock), (lora, peft)))
    return Card(
        "Mixtures of experts",
        f"A step of 8 layers of the 35B-A3B shape takes {ms(ours)} and is {gain} as fast as the stock class. With LoRA, on "
        f"the experts too, it is {lora_gain} as fast as with PEFT.",
        [
            f"""35B-A3B and Next-80B have the layer sizes of Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B, fewer layers and random
weights. *Ours* is the class of this package on a packed row, and *stock, packed* is Transformers' own class on the same row with
its default `grouped_mm` experts and with Liger's norms, shared expert and fused loss. *Ours, with `grouped_mm` experts* differs from *ours* in the
experts alone. {LENGTHS}""",
            table(
                ("Shape", "Variant", "Time", "Time over the first", "Peak memory", "Above weights and gradients"), rows
            ),
            """Memory above weights and gradients is the peak without the bytes of the parameters and of their gradients. Gradients
exist only after the backward of their layer, so this can be less than the activations.""",
            f"""The step of all weights reaches {percent(ours["share_of_sustained_gemm_rate"])} of the FLOPs per second of a matrix
product that is repeated for a second. The logits take about as many FLOPs as the 8 layers. The rows without the head come
closer to a model with many layers.""",
            """The adapters have rank 16 on all linear layers of a block, except routers and gates of shared experts, and by
`target_parameters` on the experts. They are in float32 under
autocast, and their weights are random. PEFT adds the adapters of the experts to a copy of the weights.""",
            """CUDA graphs keep gradients of their own, which the memory includes.""",
            *parts_of(results["experts.json"]["runs"]),
            setting("packed"),
        ],
        ["moe.json", "experts.json"],
        **on_gpu(results, "moe.json"),
        commands=[run["command"] for run in (full, adapters, headless, short, next_80b)]
        + [results["experts.json"]["runs"][0]["command"]],
        committed=[MOE, EXPERTS],
        number=f"{ms(ours)} against {ms(stock)} (stock), with LoRA {ms(lora)} against {ms(peft)}",
    )


def parts_of(runs: list[dict]) -> list[str]:
    """The experts of one layer by themselves."""
    rows = [
        (run["model"], NAMES.get(name, f"`{name}`"), f"{arm['median_ms']:.1f} ms", f"{arm['tflops']:.0f} TFLOP/s")
        for run in runs
        for name, arm in run["arms"].items()
    ]
    return [
        "## The experts of one layer",
        """Forward and backward from the logits of the router to the sum of the experts' outputs, at 16,384 tokens. Some
experts get more tokens than others. The rate counts the products of the chosen experts only.""",
        table(("Shape", "Variant", "Time", "Rate"), rows),
    ]
