"""The page of whole training steps of `PackedTrainer`."""

from card import WHOLE_STEPS, Card, fixed, gib, percent, table
from steps import SHAPE


KINDS = {"one": "1", "ddp": "2, DDP", "fsdp2": "2, FSDP2"}


def whole_steps(results: dict) -> Card:
    report = results["whole_steps.json"]
    done = [run for run in report["runs"] if "error" not in run]
    small = [run for run in done if "H100" in run["machine"]]
    fits = max(run["peak_GiB"] for run in small)
    profiled = next(run for run in done if "profile" in run)
    found = profiled["profile"]
    return Card(
        "Whole steps, and a GPU of 80 GB",
        f"On an H100 of 80 GB, full fine-tuning of the 4B shape with AdamW and LoRA of the 9B shape fit at 16,384 tokens, in at "
        f"most {fixed(fits, 1)} GiB.",
        [
            f"""{SHAPE} A step of `PackedTrainer` loads a row of up to 16,384 tokens on each GPU, and runs forward, backward,
clipping and AdamW (`adamw_torch_fused`). Weights and AdamW are in the dtype of the table, and compute is in bfloat16.""",
            table(
                (
                    "GPU",
                    "Number",
                    "Shape",
                    "Trained",
                    "Weights",
                    "Checkpointing",
                    "Step",
                    "Tokens/s of a GPU",
                    "Peak memory",
                ),
                [line(run) for run in report["runs"]],
            ),
            f"""With FSDP2, the kernels of a step compute for {fixed(found["computation_ms"], 0)} ms and communicate for
{fixed(found["communication_ms"], 0)} ms, of which no computation covers {fixed(found["uncovered_communication_ms"], 0)} ms
(torch's profiler, one step of the 4B shape). The host waits for the GPU {found["waits"]["cudaStreamSynchronize"]} times in a
step of {profiled["layers"]} layers, so not once per layer.""",
            """On one H200, 4B with weights and AdamW in float32 does not fit at 16,384 tokens without gradient checkpointing. So
there is no step of one GPU to compare with that of FSDP2.""",
            """Rows are not quite full, and only their real tokens count. For these runs, their number comes from the plans and the
logs.""",
        ],
        ["whole_steps.json"],
        machine="one NVIDIA H100 80GB, and one and two NVIDIA H200",
        versions=report["runs"][0]["versions"],
        commands=[run["command"] for run in report["runs"]],
        committed=[WHOLE_STEPS],
        number=f"9B with LoRA {fixed(small[-1]['peak_GiB'], 1)} GiB, 4B {fixed(small[0]['peak_GiB'], 1)} GiB with checkpointing",
    )


def line(run: dict) -> tuple:
    gpu = "H100, 80 GB" if "H100" in run["machine"] else "H200"
    head = (
        gpu,
        KINDS[run.get("kind", "one")],
        run["model"],
        "LoRA" if run["lora"] else "all",
        run["weights"],
        "yes" if run["checkpointing"] else "",
    )
    if "error" in run:
        return (*head, "out of memory", "", "")
    share = percent(run["model_flops_utilization"])
    step = f"{fixed(run['step_ms'], 0)} ms, {share} of 989 TFLOP/s"
    return (*head, step, f"{run['tokens_per_second_per_gpu']:,}", gib(run))
