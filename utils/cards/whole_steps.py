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
    sharded, short = (find(done, "4B", "fsdp2", tokens) for tokens in (16384, 4096))
    long, brief = sharded["profile"], short["profile"]
    left = short["step_ms"] - brief["computation_ms"] - brief["uncovered_communication_ms"]
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
            f"""**DDP.** In a profiled step of 0.8B, kernels compute for {ms_of(ddp["profile"], "computation")} and communicate for
{ms_of(ddp["profile"], "communication")}, of which no computation covers {ms_of(ddp["profile"], "uncovered_communication")}. Two
settings were tried in the same call and are about as fast: buckets of 400 MB with `NCCL_MAX_CTAS=8`, and one bucket for all
gradients.""",
            f"""**FSDP2.** In a profiled step of 4B with 16,384 tokens, kernels compute for {ms_of(long, "computation")} and communicate
for {ms_of(long, "communication")}, of which no computation covers {ms_of(long, "uncovered_communication")}. The host waits for the
GPU {long["waits"]["cudaStreamSynchronize"]} times in a step of {sharded["layers"]} layers, so not once per layer, and no layer copies
boundaries from pageable memory.""",
            f"""**CUDA graphs under FSDP2** are refused, because they have little to gain. With rows of 4,096 tokens, the kernels of a
step compute for {ms_of(brief, "computation")}, and no computation covers {ms_of(brief, "uncovered_communication")} of the
communication. At most {fixed(left, 0)} ms of the {fixed(short["step_ms"], 0)} ms are left for launches.""",
            """In these runs, Trainer waited for the GPU twice in each step. `configure_packing` and `PackedTrainer` have since
[removed these waits](../how_to/trainer.md), and the steps have not been measured again.""",
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


def find(runs: list[dict], model: str, kind: str, tokens: int = 16384) -> dict:
    """The last run of this kind on H200s."""
    given = {"model": model, "kind": kind, "tokens": tokens}
    return [run for run in runs if "H200" in run["machine"] and given.items() <= run.items()][-1]


def ms_of(profile: dict, name: str) -> str:
    return f"{fixed(profile[f'{name}_ms'], 0)} ms"


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
