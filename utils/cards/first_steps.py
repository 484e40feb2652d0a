"""The page of kernels that are compiled during training, with and without warm-up."""

from card import FIRST_STEPS, Card, fixed, on_gpu, table
from steps import SHAPE


ARMS = {
    "ours": "full",
    "ours+lora": "LoRA",
    "ours+graphs": "full, CUDA graphs",
    "ours+float8": "full, FP8",
    "ours+lora+float8": "LoRA, FP8",
}
_DISK = " from disk"


def first_steps(results: dict) -> Card:
    runs = results["first_steps.json"]["runs"]
    cold = next(run for run in runs if not run["warm_up"])
    warm = next(run for run in runs if run["warm_up"])
    late = {event["step"] for event in cold["events"] if event["step"] > 1}
    slowest = [entry for entry in cold["slowest"] if entry["step"] in late]
    rows = [
        (
            arm(run),
            f"{fixed(run['warm_up_seconds'], 1)} s" if run["warm_up"] else "none",
            built(run["before_step_1"]),
            f"{fixed(run['first_step_ms'] / 1000, 2)} s",
            f"{fixed(slowest_later(run) / 1000, 2)} s",
            f"{fixed(run['median_ms'], 0)} ms",
            built(run["during_steps"]),
        )
        for run in (cold, *(run for run in runs if run["warm_up"]))
    ]
    header = ("Training", "Warm-up", "Kernels in it", "First step", "Slowest later step", "Median", "Kernels in steps")
    return Card(
        "Kernels before the first step",
        f"After `warm_up`, {warm['steps']} steps with 1 to {warm['documents']} documents compile nothing. Without it, a kernel of "
        f"FlashQLA stops {len(slowest)} later steps for {' and '.join(fixed(x['ms'] / 1000, 1) for x in slowest)} s.",
        [
            f"""{SHAPE} This is {warm["model"]}, in bfloat16, with AdamW. A row has up to {warm["tokens"]:,} tokens. Its documents
have all sizes, and their number is another one in each step.""",
            table(header, rows),
            """Kernels are counted when they are compiled or loaded into the process: those of TileLang (FlashQLA), of Triton, graphs of
`torch.compile`, measurements of Triton's autotuner, and recordings of CUDA graphs. A row of the table is a process.""",
            f"""The first two processes started without TileLang's kernels on disk, and took
{fixed(seconds(cold["during_steps"], "tilelang"), 0)} s to compile them. The others found them there, and
[`warm_up`](../how_to/warm_up.md) then takes seconds.""",
            f"""Without warm-up, the kernels that stop later steps serve rows with few documents:
{" and ".join(f"{entry['documents']} in step {entry['step']}" for entry in slowest)}.""",
        ],
        ["first_steps.json"],
        **on_gpu(results, "first_steps.json"),
        commands=[run["command"] for run in runs],
        committed=[FIRST_STEPS],
        number=f"nothing compiled in {warm['steps']} steps, without warm-up up to {fixed(slowest[0]['ms'] / 1000, 1)} s in one",
    )


def arm(run: dict) -> str:
    return ARMS[run["arm"]] + ", checkpointing" * ("--checkpointing" in run["command"])


def built(counts: dict) -> str:
    """How many kernels were compiled, loaded and recorded."""
    loaded = sum(entry["number"] for name, entry in counts.items() if name.endswith(_DISK))
    graphs = counts.get("cuda graph", {"number": 0})["number"]
    compiled = sum(entry["number"] for entry in counts.values()) - loaded - graphs
    parts = [(compiled, "compiled"), (loaded, "loaded"), (graphs, "graphs")]
    return ", ".join(f"{number} {what}" for number, what in parts if number) or "none"


def seconds(counts: dict, package: str) -> float:
    return counts[package]["seconds"]


def slowest_later(run: dict) -> float:
    return max(entry["ms"] for entry in run["slowest"] if entry["step"] > 1)
