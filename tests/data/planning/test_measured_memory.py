"""The plan of `transformers-packed memory` against every committed step, and against the figures of its page."""

import json
import re
import unittest
from functools import lru_cache
from pathlib import Path

from common.sizes import SIZES, in_awq, in_fp8, in_nvfp4
from transformers import CONFIG_MAPPING, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from transformers_packed.data.planning.step_memory import Parameters, checkpointed_layers, step_memory
from transformers_packed.models.checkpoint_kinds import stored_as
from transformers_packed.models.families import SIZED, sizes_of
from transformers_packed.models.memory import NF4, Lora, on_host_of
from transformers_packed.models.optimizers import DEFAULT, OPTIMIZERS
from transformers_packed.models.versions import joins_stored_experts


ROOT = Path(__file__).parents[3]
GIB = 2**30
HYBRIDS = {"kimi_linear": "Kimi-Linear", "bailing_hybrid": "Bailing-Hybrid", "olmo_hybrid": "OLMo-Hybrid"}
MIXTURES = {"35B-A3B": Qwen3_5MoeTextConfig, "Next-80B": Qwen3NextConfig}
# Weights, their titles, and the configurations of checkpoints that have them.
WEIGHTS = {"nf4": ("NF4", None), "fp8": ("FP8", in_fp8), "nvfp4": ("NVFP4", in_nvfp4), "awq": ("AWQ", in_awq)}
# Files of other steps than the plan's: with a teacher, answers to shared prompts, or the memory of the host.
OTHER_STEPS = {"distillation", "preference", "reward", "packing"}
# Arms in which Transformers computes the experts, PEFT casts what is not quantized, or frozen weights have torchao's
# float8, which no checkpoint has.
OTHER_ARMS = {"stock-experts", "prepared", "float8base"}
# Steps of short rows with the shape or family and the tokens, measured with chunks of 3,072 rows of logits. They now take
# less. A new measurement replaces them.
LONGER_CHUNKS = {("0.8B", 2048), ("0.8B", 4096), ("olmo_hybrid", 8192)}
# Wider bounds, with their reasons. In these hybrids, 8 layers of hidden size 1,024 keep what is small in larger ones.
BOUND, OF_HYBRIDS = 0.05, 0.1
OF_EXPERTS = "LoRA of experts"
WAYS = ("without", "with", "offload")


def peaks():
    """Yield the file of each measured peak, and all that the result says of it, with the names above it as `under`."""

    def walk(found, known):
        if isinstance(found, list):
            for part in found:
                yield from walk(part, known)
        elif isinstance(found, dict):
            known = known | found
            if {"peak_GiB", "peak_gib"} & found.keys():
                yield known
            for name, part in found.items():
                yield from walk(part, known | {"under": (*known["under"], name)})

    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for known in walk(json.loads(path.read_text()), {"under": ()}):
            yield path.stem, known


def arm_of(run):
    return run.get("tool") or run.get("arm") or run["under"][-1]


def why_left_out(file, run):
    """The reason if the plan does not describe a step."""
    words = set(re.split(r"\+|, ", arm_of(run)))
    if file in OTHER_STEPS or run.get("task", "sft") != "sft" or words & OTHER_ARMS or run.get("weights") == "float8":
        return "a step that the plan does not have"
    if "kind" not in run and words & {"stock", "padded", "packed", "per document", "liger", "unsloth"}:
        return "code of others"
    if run.get("family", "qwen3_5").partition(",")[0] not in {family.name for family in SIZED}:
        return "a family whose sizes are not known"
    # A replay allocates nothing.
    if "graphs" in words or run.get("graphs") or run.get("chose_graphs") or run.get("graphs_GiB"):
        return "CUDA graphs, which own memory"
    shape = (run["family"], sum(run["lengths"])) if "family" in run else (run.get("model"), run.get("tokens"))
    if file in ("step", "families") and shape in LONGER_CHUNKS:
        return "before short rows had smaller chunks of logits"
    # These results do not have what the allocator reserved.
    if run.get("weights") == "float32" and run.get("kind") in ("one", "ddp") and "reserved_GiB" not in run:
        return "before linear layers whose weights autocast casts were fused, and saved copies of them"
    return "FSDP2 that keeps layers gathered" if "reshard_after_forward false" in run.get("command", "") else ""


@lru_cache
def known(model, layers, weights, mtp):
    given = {"num_hidden_layers": layers} if layers else {}
    config = MIXTURES[model](**given) if model in MIXTURES else Qwen3_5TextConfig(**SIZES[model] | given)
    change = WEIGHTS.get(weights, ("", None))[1]
    return with_sizes(change(config) if change else config, mtp)


def with_sizes(config, mtp=False):
    return config, sizes_of(config), Parameters.of(config, mtp)


def computed(file, run):
    """The row of the page for a step, but its figures, and GiB by the formulas."""
    arm, variant = arm_of(run), run.get("variant") or ""
    words, weights = set(re.split(r"\+|, ", arm)), run.get("weights", "bfloat16")
    of_others = "family" in run
    lora = run.get("lora") is True or bool(words & {"lora", "qlora", "LoRA", OF_EXPERTS}) or file == "one_document"
    weights = "nf4" if run.get("qlora") or run.get("load_in_4bit") or words & {"qlora", "NF4"} else weights
    mtp = next((word for word in ("mtp", "mtp-only") if word in words), "")
    optim = run.get("optim") or (DEFAULT if "tool" in run else None)
    model = run["family"] if of_others else run.get("model") or next((x for x in run["under"] if x in SIZES), "0.8B")
    model, few, _ = model.partition("-12L")
    layers = (12 if few else run.get("layers")) if model in MIXTURES else None
    if of_others:
        given = dict(run["config"])
        config, sizes, parameters = with_sizes(CONFIG_MAPPING[given.pop("model_type")](**given))
    else:
        config, sizes, parameters = known(model, layers, weights, bool(mtp))
    experts = lora and bool(sizes.mixtures) and not (run.get("linear") or "LoRA" in words)
    tokens = sum(run["lengths"]) if of_others else run.get("tokens", 2**14)
    # The processes that share weights, and those that share a row.
    gpus = run.get("gpus", 2)
    size = run.get("size", gpus if "SP" in words else 1)
    spread = "EP" if "EP" in words else "FSDP2" if "FSDP2" in words or run.get("kind") == "fsdp2" else ""
    always = file in ("sequence_parallel", "long_documents", "one_document", "segments")
    saving = (run.get("checkpointing") or always) + bool(run.get("offload") or "offload" in variant)
    every = run.get("every_n_layers") or 1
    stored = NF4 if weights == "nf4" else stored_as(config)
    need = step_memory(
        sizes,
        parameters,
        tokens,
        size,
        gpus if spread or {"DDP", "NF4"} <= words else 1,
        4 if weights == "float32" else 2,
        checkpointed_layers(config, every * (saving > 0), bool(mtp)),
        saving == 2,
        (arm.partition("+")[2] or "heads") if size > 1 else None,
        Lora(
            16 * lora,
            experts,
            stored if lora else None,
            mtp == "mtp-only",
            on_host_of(run.get("experts_in_host_memory", False), run.get("layers_in_host_memory", False)),
        ),
        OPTIMIZERS[optim or DEFAULT],
        1,
        gpus if spread == "EP" else 1,
        "kept" in words,
        run.get("segment_tokens"),
    )
    kept = ", attention kept" if "kept" in words else ""
    kept += f", segments of {run['segment_tokens']:,}" if run.get("segment_tokens") else ""
    kept += f", every {every} layers" if every > 1 else ""
    head = {"": "", "mtp": ", MTP", "mtp-only": ", MTP alone"}[mtp]
    own = config.num_hidden_layers == MIXTURES[model]().num_hidden_layers if model in MIXTURES else True
    shape = f"{HYBRIDS.get(model, model)}{'' if own else f', {layers} layers'}"
    spread, kind = f", {spread}" if spread else "", "QLoRA" if weights == "nf4" else "LoRA"
    if optim is None:
        adapters = f", {kind}{' of experts too' if experts else ''}" if lora else ""
        row = f"{shape}{adapters}{head}{spread}{kept} {tokens:,} {size} {WAYS[saving]}"
        # The longest of these rows peak at the loss. Without a Trainer, embeddings require no gradient, and are on the host.
        embeddings = 2 * tokens * sizes.hidden if file == "segments" else 0
        return row, (need.total - need.moments - embeddings) / GIB
    trained = f"{kind if lora else 'all'}{' without experts' if run.get('linear') else ''}"
    name = "" if optim == DEFAULT else f", {optim}"
    row = f"{shape} {trained}, {WEIGHTS.get(weights, (weights,))[0]}{name}{spread}{kept} {tokens:,} {WAYS[saving]}"
    return row, need.total / GIB


class MeasuredMemoryTest(unittest.TestCase):
    """[`why_left_out`] says which steps are left out."""

    def test_reads_the_segments_of_a_step(self):
        run = {"model": "4B", "weights": "bfloat16", "tokens": 2**16, "lora": True, "checkpointing": True}
        run |= {"optim": DEFAULT, "kind": "one", "under": ("runs",)}
        (row, whole), (cut_row, cut) = (computed("whole_steps", run | {"segment_tokens": n}) for n in (None, 2**14))
        self.assertEqual(row, "4B LoRA, bfloat16 65,536 with")
        self.assertEqual(cut_row, "4B LoRA, bfloat16, segments of 16,384 65,536 with")
        self.assertLess(cut, whole - 3)

    @unittest.skipUnless(joins_stored_experts(), "needs Transformers 5.21 for the configurations of some steps")
    def test_fits_every_step(self):
        rows, files = set(), set()
        for file, run in peaks():
            if why_left_out(file, run):
                continue
            row, expected = computed(file, run)
            measured, digits = run.get("peak_GiB") or run["peak_gib"], 1 if {"optim", "tool"} & run.keys() else 2
            row = f"{row} {measured:.{digits}f} {expected:.{digits}f}"
            with self.subTest(row, file=file):
                bound = OF_HYBRIDS if run.get("family", "").partition(",")[0] in HYBRIDS else BOUND
                self.assertLess(abs(expected / measured - 1), bound)
            rows.add(row)
            files.add(file)
        self.assertGreaterEqual(files, {"step", "mtp", "peers", "one_document", "whole_steps", "expert_parallel"})
        page = (ROOT / "docs/reference/memory.md").read_text().partition("## Measured and computed")[2]
        lines = [" ".join(line.split()) for line in page.splitlines()]
        # Tokens, how layers are checkpointed, and two figures.
        figures = {line for line in lines if re.search(rf"\d( \d)? ({'|'.join(WAYS)}) [\d.]+ [\d.]+$", line)}
        self.assertGreater(len(figures), 70)
        self.assertEqual(figures - rows, set())
