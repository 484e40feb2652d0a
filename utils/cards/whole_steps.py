"""The page of whole training steps of `PackedTrainer`."""

from card import WHOLE_STEPS, WHOLE_STEPS_AGAIN, Card, fixed, gib, percent, table
from steps import SHAPE


KINDS = {"one": "1", "ddp": "2, DDP", "fsdp2": "2, FSDP2"}


def whole_steps(results: dict) -> Card:
    report = results["whole_steps.json"]
    done = [run for run in report["runs"] if "error" not in run]
    small = [run for run in done if "H100" in run["machine"] and run["model"] != "0.8B"]
    fits = max(run["peak_GiB"] for run in small)
    one, large = find(done, "0.8B", "one"), find(done, "4B", "one")
    searching, unsearched = (find_all(done, "0.8B", "ddp", ddp_find_unused_parameters=x) for x in (True, False))
    resharded, kept = find_all(done, "4B", "fsdp2")
    alone, both, alone_as_graphs, both_as_graphs = (
        find(done, "0.8B", kind, machine="NVIDIA H100 80GB HBM3", graphs=x)
        for x in (False, True)
        for kind in ("one", "ddp")
    )
    halved = find(done, "0.8B", "ddp", comm_hook="bf16")
    ddp, best = searching[-1], max(unsearched, key=speed)
    low, high = (percent(f(map(speed, unsearched)) / speed(one)) for f in (min, max))
    resharding, keeping, found = (
        percent(speed(x) / speed(y)) for x, y in ((resharded, large), (kept, large), (ddp, one))
    )
    short, waiting = find(done, "4B", "fsdp2", tokens=4096), find(done, "0.8B", "one", waits=True)
    graphs = find(done, "4B", "ddp", tokens=4096, graphs=True)
    waits = sum(kept["profile"]["waits"].get(name, 0) for name in ("cudaStreamSynchronize", "cudaEventSynchronize"))
    addresses = short["profile"]["weight_addresses"]
    return Card(
        "Whole steps, and a GPU of 80 GB",
        f"On an H100 of 80 GB, full fine-tuning of the 4B shape with AdamW and LoRA of the 9B shape fit at 16,384 tokens, in at "
        f"most {fixed(fits, 1)} GiB. Each of two H200s reaches {low} to {high} of the tokens per second of one with DDP (0.8B), "
        f"each of two H100s {percent(speed(both) / speed(alone))}, "
        f"and {resharding} to {keeping} with FSDP2 (4B).",
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
            f"""With FSDP2, the host waits for the GPU {"once" if waits == 1 else f"{waits} times"} in a step of {kept["layers"]} layers (torch's profiler, 4B with 16,384
tokens): for the number of targets. No layer waits, and no layer copies boundaries from pageable memory. FSDP2 computes in
bfloat16, so it is compared with bfloat16 weights on one GPU. With `fsdp_reshard_after_forward: false`, a layer is gathered
once in a step, for {fixed(kept["peak_GiB"] - resharded["peak_GiB"], 1)} GiB more: {keeping} of one GPU instead of {resharding}. Of {fixed(kept["profile"]["communication_ms"], 0)} ms of communication, computation then covers all
but {fixed(kept["profile"]["uncovered_communication_ms"], 0)} ms, which includes waiting for the other GPU.""",
            f"""DDP reaches {low} to {high} of one GPU in {len(unsearched)} runs without a search for unused parameters, and {found} with it. The sums of
gradients take {fixed(best["profile"]["communication_ms"], 0)} ms of the fastest run, all but {fixed(best["profile"]["uncovered_communication_ms"], 0)} ms beside other kernels: those of the tied embedding come last. DDP also
copies each gradient into its bucket, with a kernel for each parameter. Sums in bfloat16 have half the bytes, and change
little: {speed(halved):,} instead of {speed(unsearched[-1]):,} tokens per second of a GPU in 100 steps.""",
            f"""On two H100s of another host, DDP reaches **{percent(speed(both) / speed(alone))}** of one GPU in 100 steps. CUDA graphs do not help at this length: {speed(alone_as_graphs):,} tokens per second on one GPU, and
{speed(both_as_graphs):,} on each of two, because all gradients of the layers are then summed after the backward. The peak memory of
graphs leaves out what they reserve.""",
            f"""CUDA graphs do not support FSDP2, because a graph reads a weight at one address. In the run with 4,096 tokens, FSDP2
gathered each weight of a layer at {min(addresses)} to {max(addresses)} addresses. Where the whole model fits
on a GPU, DDP keeps its weights in place, and graphs work: {graphs["tokens_per_second_per_gpu"]:,} tokens per second of a GPU with weights in bfloat16,
and {short["tokens_per_second_per_gpu"]:,} with FSDP2, which also keeps its weights in float32.""",
            f"""The step of {fixed(waiting["step_ms"], 0)} ms has waits that [`configure_packing`](../how_to/trainer.md) removes. It ran on another machine of the
same kind, before the model stopped waiting for document lengths and for the loss.""",
            """Steps of the 4B shape on H100s and those of the 9B shape were measured with these waits. On one H200, 4B with weights and AdamW in float32
does not fit at 16,384 tokens without gradient checkpointing.""",
            """Rows are not quite full, and only their real tokens count. Rows with longer documents take longer, so the tokens per
second of two runs differ by some percent.""",
        ],
        ["whole_steps.json"],
        machine="one and two NVIDIA H100 80GB, and one and two NVIDIA H200",
        versions=report["runs"][0]["versions"],
        commands=[run["command"] for run in report["runs"]],
        committed=[WHOLE_STEPS, WHOLE_STEPS_AGAIN],
        number=f"9B with LoRA {fixed(small[-1]['peak_GiB'], 1)} GiB, 4B {fixed(small[0]['peak_GiB'], 1)} GiB with checkpointing",
    )


def find(runs: list[dict], model: str, kind: str, **others) -> dict:
    """The last run of this kind, on H200s unless `machine` says otherwise."""
    return find_all(runs, model, kind, **others)[-1]


def find_all(runs: list[dict], model: str, kind: str, tokens: int = 16384, **others) -> list[dict]:
    given = {
        "model": model,
        "kind": kind,
        "tokens": tokens,
        "waits": False,
        "graphs": None,
        "comm_hook": None,
        "machine": "NVIDIA H200",
        **others,
    }
    return [run for run in runs if given.items() <= {"comm_hook": None, **run}.items()]


def speed(run: dict) -> int:
    return run["tokens_per_second_per_gpu"]


def line(run: dict, waiting: bool = False) -> tuple:
    gpu = "H100, 80 GB" if "H100" in run["machine"] else "H200"
    options = ["with both waits of Trainer"] * waiting + ["CUDA graphs"] * bool(run["graphs"])
    options += ["search for unused parameters"] * (run.get("ddp_find_unused_parameters") is True)
    options += [f"gradients summed in {run.get('comm_hook')}"] * bool(run.get("comm_hook"))
    options += ["layers gathered once"] * ("reshard_after_forward false" in run["command"])
    options += ["NCCL_MAX_CTAS=8"] * ("NCCL_MAX_CTAS=8" in run["command"])
    head = (
        gpu,
        KINDS[run.get("kind", "one")],
        ", ".join([run["model"], *options]),
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
