"""The page of steps with DDP and FSDP2 on several GPUs."""

from card import DATA_PARALLEL, Card, ms, percent, table, times
from steps import SHAPE


ARMS = {"ours": "bf16", "ours+float8": "FP8"}
KINDS = {"one": "one GPU", "ddp": "DDP", "fsdp2": "FSDP2"}


def data_parallel(results: dict) -> Card:
    (run,) = results["data_parallel.json"]["runs"]
    rows = []
    for arm, kinds in run["arms"].items():
        for kind, entry in kinds.items():
            error = percent(entry["gradient_error"], 1) if "gradient_error" in entry else ""
            time = {"median_ms": entry["ms"]}
            rows.append((ARMS[arm], KINDS[kind], ms(time), times(entry["ms"] / kinds["one"]["ms"]), error))
    bf16, float8 = (run["arms"][arm]["fsdp2"] for arm in ARMS)
    return Card(
        "DDP and FSDP2 on two GPUs",
        f"With FSDP2 on two GPUs, the gradients of {run['layers']} layers of the {run['model']} shape are within "
        f"{percent(bf16['gradient_error'], 1)} of one GPU's in bf16, and within {percent(float8['gradient_error'], 1)} with FP8.",
        [
            f"""{SHAPE} The model has {run["layers"]} of its layers, and each GPU has a row of {run["tokens"]:,} tokens. The head and the
embedding take a larger part of the step than in the whole model.""",
            table(("Products", "GPUs", "Time", "Time over one GPU", "Gradient error"), rows),
            """The gradient error is the norm of the difference from the mean of the gradients that one GPU computes for both rows, over
the norm of that mean. It is rounding: in bf16 the two add the rows in another order.""",
            """FSDP2 shards each decoder layer, and gathers it again in the backward. Each time is the mean of five steps of forward and
backward, between barriers.""",
        ],
        ["data_parallel.json"],
        machine=results["data_parallel.json"]["machine"],
        versions=results["data_parallel.json"]["versions"],
        commands=[run["command"]],
        committed=[DATA_PARALLEL],
        number=f"FSDP2 {times(bf16['ms'] / run['arms']['ours']['one']['ms'])} the time of one GPU",
    )
