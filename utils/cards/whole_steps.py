"""The page of whole training steps of `PackedTrainer`."""

from card import WHOLE_STEPS, WHOLE_STEPS_AGAIN, Card, fixed, gib, percent, table
from steps import SHAPE


KINDS = {"one": "1", "ddp": "2, DDP", "fsdp2": "2, FSDP2"}


def whole_steps(results: dict) -> Card:
    report = results["whole_steps.json"]
    done = [run for run in report["runs"] if "error" not in run]
    small = [run for run in done if "H100" in run["machine"]]
    fits = max(run["peak_GiB"] for run in small)
    one, ddp = (find(done, "0.8B", kind) for kind in ("one", "ddp"))
    sharded = find(done, "4B", "fsdp2")
    waits = sharded["profile"]["waits"]
    share = percent(ddp["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"])
    return Card(
        "Whole steps, and a GPU of 80 GB",
        f"On an H100 of 80 GB, full fine-tuning of the 4B shape with AdamW and LoRA of the 9B shape fit at 16,384 tokens, in at "
        f"most {fixed(fits, 1)} GiB. With DDP, each of two H200s reaches {share} of the tokens per second of one.",
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
                [line(run) for run in report["runs"]],
            ),
            f"""With FSDP2, the host waits for the GPU {waits["cudaStreamSynchronize"]} times in a step of {sharded["layers"]} layers (torch's
profiler, 4B with 16,384 tokens). So it does not wait once per layer, and no layer copies boundaries from pageable
memory.""",
            """These steps include two waits of Trainer for the GPU, which [`configure_packing`](../how_to/trainer.md) removes. Steps
without them have not been measured.""",
            """On one H200, 4B with weights and AdamW in float32 does not fit at 16,384 tokens without gradient checkpointing. So
there is no step of one GPU to compare with that of FSDP2.""",
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


def find(runs: list[dict], model: str, kind: str) -> dict:
    """The last run of this kind on H200s."""
    given = {"model": model, "kind": kind, "tokens": 16384}
    return [run for run in runs if "H200" in run["machine"] and given.items() <= run.items()][-1]


def line(run: dict) -> tuple:
    gpu = "H100, 80 GB" if "H100" in run["machine"] else "H200"
    head = (
        gpu,
        KINDS[run.get("kind", "one")],
        run["model"],
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
