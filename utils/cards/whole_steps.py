"""The page of whole training steps of `PackedTrainer`."""

from card import WHOLE_STEPS, WHOLE_STEPS_AGAIN, Card, fixed, gib, percent, table
from steps import SHAPE


KINDS = {"one": "1", "ddp": "2, DDP", "fsdp2": "2, FSDP2"}


def whole_steps(results: dict) -> Card:
    report = results["whole_steps.json"]
    done = [run for run in report["runs"] if "error" not in run]
    small = [run for run in done if "H100" in run["machine"]]
    fits = max(run["peak_GiB"] for run in small)
    one, ddp, large, sharded = (
        find(done, *wanted) for wanted in (("0.8B", "one"), ("0.8B", "ddp"), ("4B", "one"), ("4B", "fsdp2"))
    )
    short, waiting = find(done, "4B", "fsdp2", tokens=4096), find(done, "0.8B", "one", waits=True)
    waits = sharded["profile"]["waits"]
    shares = [
        percent(x["tokens_per_second_per_gpu"] / y["tokens_per_second_per_gpu"])
        for x, y in ((ddp, one), (sharded, large))
    ]
    return Card(
        "Whole steps, and a GPU of 80 GB",
        f"On an H100 of 80 GB, full fine-tuning of the 4B shape with AdamW and LoRA of the 9B shape fit at 16,384 tokens, in at "
        f"most {fixed(fits, 1)} GiB. Each of two H200s reaches {shares[0]} of the tokens per second of one with DDP (0.8B), and "
        f"{shares[1]} with FSDP2 (4B).",
        [
            f"""{SHAPE} A step of `PackedTrainer` loads a row on each GPU, and runs forward, backward, clipping and AdamW
(`adamw_torch_fused`). Weights and AdamW are in the dtype of the table, and compute is in bfloat16. FSDP2 keeps trained
weights in float32.""",
            table(
                (
                    "GPU",
                    "Number",
                    "Shape",
                    "Trained",
                    "Weights",
                    "Checkpointing",
                    "Tokens of a row",
                    "Step",
                    "Tokens/s of a GPU",
                    "Peak memory",
                ),
                [line(run, run is waiting) for run in report["runs"]],
            ),
            f"""With FSDP2, the host waits for the GPU {waits["cudaStreamSynchronize"]} times in a step of {sharded["layers"]} layers (torch's
profiler, 4B with 16,384 tokens). So it does not wait once per layer, and no layer copies boundaries from pageable
memory. Of {fixed(sharded["profile"]["communication_ms"], 0)} ms of communication, computation covers all but {fixed(sharded["profile"]["uncovered_communication_ms"], 0)} ms. FSDP2 computes in bfloat16, so it is compared with
bfloat16 weights on one GPU.""",
            f"""The host is the bound of small shapes and of short rows. The kernels of 0.8B on one GPU take {fixed(one["profile"]["computation_ms"], 0)} ms of a step of
{fixed(one["step_ms"], 0)} ms. With DDP, {fixed(ddp["profile"]["uncovered_communication_ms"], 0)} ms of communication are not covered, which includes waiting for the other GPU. With
FSDP2 and rows of 4,096 tokens, kernels and uncovered communication take {fixed(short["profile"]["computation_ms"] + short["profile"]["uncovered_communication_ms"], 0)} of {fixed(short["step_ms"], 0)} ms. The GPU waits for
the host in the rest. CUDA graphs do not support FSDP2 yet.""",
            f"""Trainer waits for the GPU twice in each step, and [`configure_packing`](../how_to/trainer.md) removes these waits. A step of
0.8B on one GPU takes {fixed(waiting["step_ms"], 1)} ms with them and {fixed(one["step_ms"], 1)} ms without. In both, the model still waited for
the document lengths. Steps without that wait have not been measured.""",
            """Steps on H100s and those of the 9B shape were measured with these waits. On one H200, 4B with weights and AdamW in float32
does not fit at 16,384 tokens without gradient checkpointing.""",
            """Rows are not quite full, and only their real tokens count. Rows with longer documents take longer, so the tokens per
second of two runs differ by some percent.""",
        ],
        ["whole_steps.json"],
        machine="one NVIDIA H100 80GB, and one and two NVIDIA H200",
        versions=report["runs"][0]["versions"],
        commands=[run["command"] for run in report["runs"]],
        committed=[WHOLE_STEPS, WHOLE_STEPS_AGAIN],
        number=f"9B with LoRA {fixed(small[-1]['peak_GiB'], 1)} GiB, 4B {fixed(small[0]['peak_GiB'], 1)} GiB with checkpointing",
    )


def find(runs: list[dict], model: str, kind: str, tokens: int = 16384, waits: bool = False) -> dict:
    """The last run of this kind on H200s."""
    given = {"model": model, "kind": kind, "tokens": tokens, "waits": waits}
    return [run for run in runs if "H200" in run["machine"] and given.items() <= run.items()][-1]


def line(run: dict, waiting: bool = False) -> tuple:
    gpu = "H100, 80 GB" if "H100" in run["machine"] else "H200"
    head = (
        gpu,
        KINDS[run.get("kind", "one")],
        f"{run['model']}{', with both waits of Trainer' if waiting else ''}",
        "LoRA" if run["lora"] else "all",
        run["weights"],
        "yes" if run["checkpointing"] else "",
        f"{run['tokens']:,}",
    )
    if "error" in run:
        return (*head, "out of memory", "", "")
    share = percent(run["model_flops_utilization"])
    step = f"{fixed(run['step_ms'], 0)} ms, {share} of 989 TFLOP/s"
    return (*head, step, f"{run['tokens_per_second_per_gpu']:,}", gib(run))
