"""The page of LoRA and QLoRA steps."""

from card import LORA, LORA_AGAIN, Card, gib, ms, on_gpu, percent, table, times
from steps import LENGTHS, arms, setting


NAMES = {
    "ours": "ours, full fine-tuning",
    "ours+graphs": "ours, full fine-tuning, CUDA graphs",
    "ours+lora": "ours, LoRA",
    "ours+graphs+lora": "ours, LoRA, CUDA graphs",
    "ours+qlora": "ours, QLoRA (NF4)",
    "ours+qlora+prepared": "ours, QLoRA after `prepare_model_for_kbit_training`",
    "packed+varlen+liger+lora": "stock, packed, PEFT's LoRA",
    "packed+varlen+liger+qlora": "stock, packed, PEFT's QLoRA (NF4)",
}


def lora(results: dict) -> Card:
    runs = results["lora.json"]["runs"]
    large, checkpointed, short, small, largest, again = (
        next(run for run in runs if key in run["command"] and run["tokens"] == tokens and wanted in run["arms"])
        for key, tokens, wanted in (
            ("4B", 16_384, "ours"),
            ("--checkpointing", 16_384, "ours+qlora"),
            ("4B", 2_048, "ours+graphs+lora"),
            ("0.8B", 16_384, "ours"),
            ("9B", 16_384, "ours+lora"),
            ("0.8B", 16_384, "ours+graphs+lora"),
        )
    )
    rows = []
    for run, what in (
        (large, ""),
        (checkpointed, ", checkpointing"),
        (short, ""),
        (small, ""),
        (again, ", again"),
        (largest, ""),
    ):
        base = run["arms"].get("ours+lora", run["arms"].get("ours+graphs+lora"))["median_ms"]
        for name, arm in run["arms"].items():
            shape = f"{run['model']}, {run['tokens']:,} tokens{what}"
            rows.append((shape, NAMES[name], ms(arm), times(arm["median_ms"] / base), gib(arm)))
    ours, full, stock = (large["arms"][name] for name in ("ours+lora", "ours", "packed+varlen+liger+lora"))
    four_bit = checkpointed["arms"]["ours+qlora"]
    sustained = ours["share_of_sustained_gemm_rate"]
    return Card(
        "LoRA and QLoRA",
        f"A LoRA step of the 4B shape takes {ms(ours)}, {ours['median_ms'] / full['median_ms']:.2f} of the time of full "
        f"fine-tuning, and is {times(stock['median_ms'] / ours['median_ms'])} as fast as the stock class with PEFT.",
        [
            f"{arms('packed')} {LENGTHS}",
            table(("Shape", "Variant", "Time", "Time over ours with LoRA", "Peak memory"), rows),
            """The adapters have rank 16 on all 12 kinds of linear layers. They are in float32, and their weights are random:
products with zeros take less power, on which the GPU's clock depends. The base is in bfloat16 and runs under autocast, as in `Trainer` with `bf16=True`.""",
            f"""Counted without the products of the adapters and of the weights' gradients, the 4B step reaches
{percent(sustained)} of the FLOPs per second of a matrix product that is repeated for a second.""",
            f"""With gradient checkpointing, the peak is in the backward of an MLP. It holds the weights, a checkpoint for each
layer, the activations of one layer and the gradients of its gate. QLoRA takes {gib(four_bit)}. Its weights are dequantized
once in each direction.""",
            """At 0.8B, the host needs about as long to launch a step as the GPU to run it. Its time varies between machines and
runs: *again* marks a later run.""",
            setting("packed"),
        ],
        ["lora.json"],
        **on_gpu(results, "lora.json"),
        commands=[run["command"] for run in (large, checkpointed, short, small, largest, again)],
        committed=[LORA, LORA_AGAIN],
        number=f"{ms(ours)} against {ms(full)} (full) and {ms(stock)} (stock)",
    )
