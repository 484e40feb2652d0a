"""One training step of hybrids other than Qwen's on a packed row, and how exact it is.

Each family has 8 layers of hidden size 1,024. The arm `ours` computes recurrent and convolutional mixers on the whole row
with this package's ops. The arm `per document` computes the same model with the stock forward of these mixers, on padded
batches of documents of similar length. For Mamba mixers, that is a loop over tokens: Transformers runs an associative
scan (`use_associative_scan`) in compiled code only, which is the arm `associative scan`. Families with classes of this
package have the arm `ours` alone: compare them with `qwen3_5`, which has the same layers, hidden size and dense MLP, and
`qwen4_exp` with `qwen3_5_moe`. The last two have 4 layers of hidden size 2,560 with 512 experts. Their errors need
`--options '{"num_experts": 32}'` to fit a GPU of 80 GB. The indexer of `qwen4_exp` computes nothing unless documents are
longer than 2,063 tokens, as with `--documents 2`. With `--graphs`, families whose layers can run as CUDA graphs have the
arm `graphs` too. Errors are those of the loss and of all gradients on a shorter row, against the stock class in float32
on each document alone. Of mixtures, rounding may change the choice of experts in bfloat16.

    python benchmarks/families.py --output benchmarks/results/families.json
    python benchmarks/families.py --families bamba lfm2 --profile
    python benchmarks/families.py --families qwen3_5 kimi_linear bailing_hybrid --graphs --no-errors
"""

import argparse
import copy
import gc
import inspect
import json
import shlex
import statistics
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
import transformers
from shapes import split_tokens
from step import earlier_report, machine_name, timed
from transformers import AutoModelForCausalLM, set_seed
from transformers.integrations import hub_kernels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from transformers_packed import DataCollatorWithFlattening, patch_model, use_cuda_graphs
from transformers_packed.models import mixers
from transformers_packed.models.cuda_graphs import find_text_models, graph_length, records_graphs
from transformers_packed.models.families import family_of
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.ops.compilations import tuned_in_threads


COMMON = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE = COMMON | {"num_hidden_layers": 8, "intermediate_size": 2816}
# The heads of the default configurations, small at this hidden size, and of the sizes of released checkpoints.
SMALL_HEADS = {"mamba_n_heads": 128, "mamba_d_head": 16, "mamba_d_state": 256}
RELEASED_HEADS = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128}
ONE_ATTENTION = ["linear_attention"] * 4 + ["full_attention"] + ["linear_attention"] * 3
LATENT = {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 256} | {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# 4 layers with 512 experts, as in large released mixtures.
THREE_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
MIXTURE = COMMON | {
    "num_hidden_layers": 4,
    "hidden_size": 2560,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# The table of n-grams has few rows here: it takes 95 GiB in the released model.
QWEN4_EXP = {
    "model_type": "qwen4_exp_text",
    "output_gate_type": "sigmoid",
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 10_000,
    "split_ngram_parts": 1,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
FAMILIES = {
    "bamba": DENSE | RELEASED_HEADS | {"model_type": "bamba", "attn_layer_indices": [4]},
    "falcon_h1": DENSE | RELEASED_HEADS | {"model_type": "falcon_h1", "mamba_d_ssm": 2048},
    "granitemoehybrid": DENSE
    | RELEASED_HEADS
    | {"model_type": "granitemoehybrid", "layer_types": ONE_ATTENTION, "num_local_experts": 0}
    | {"shared_intermediate_size": 2816},
    "nemotron_h": COMMON
    | {
        "model_type": "nemotron_h",
        "intermediate_size": 4096,
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "n_groups": 8,
    }
    | {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"] * 2},
    "lfm2": DENSE
    | {"model_type": "lfm2", "block_auto_adjust_ff_dim": False}
    | {"layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"]},
    "bamba, small heads": DENSE | SMALL_HEADS | {"model_type": "bamba", "attn_layer_indices": [4]},
    "zamba2": COMMON
    | {"model_type": "zamba2", "num_hidden_layers": 8, "intermediate_size": 2816, "n_mamba_heads": 32}
    | {"mamba_headdim": 64, "attention_head_dim": 128}
    | {"layers_block_type": ["linear_attention"] * 3 + ["hybrid"] + ["linear_attention"] * 4},
    "mamba2": COMMON
    | {"model_type": "mamba2", "num_hidden_layers": 8, "num_heads": 32, "head_dim": 64, "n_groups": 1},
    "jamba": DENSE | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "num_experts": 1},
    "mamba": COMMON | {"model_type": "mamba", "num_hidden_layers": 8},
    "falcon_mamba": COMMON | {"model_type": "falcon_mamba", "num_hidden_layers": 8},
    "zamba": COMMON
    | {"model_type": "zamba", "num_hidden_layers": 8, "intermediate_size": 2816, "attention_head_dim": 128}
    | {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"] * 2},
    "lfm2_moe": DENSE
    | {"model_type": "lfm2_moe", "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
    | {"num_dense_layers": 2}
    | {"layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"]},
    "qwen3_5": DENSE
    | {"model_type": "qwen3_5_text", "layer_types": ONE_ATTENTION}
    | {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
    "olmo_hybrid": DENSE
    | {"model_type": "olmo_hybrid", "layer_types": ONE_ATTENTION, "num_key_value_heads": 16}
    | {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
    | {"linear_key_head_dim": 96, "linear_value_head_dim": 192},
    "kimi_linear": DENSE
    | LATENT
    | {"model_type": "kimi_linear", "layer_types": ONE_ATTENTION, "mlp_layer_types": ["dense"] * 8}
    | {"linear_num_heads": 8, "linear_head_dim": 128},
    "bailing_hybrid": DENSE
    | LATENT
    | {"model_type": "bailing_hybrid", "layer_types": ONE_ATTENTION, "mlp_layer_types": ["dense"] * 8}
    | {"head_dim": 128},
    "kimi_linear, mixture": DENSE
    | LATENT
    | {"model_type": "kimi_linear", "layer_types": ONE_ATTENTION, "linear_num_heads": 8, "linear_head_dim": 128}
    | {"moe_intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 4},
    "qwen3_5_moe": MIXTURE | {"model_type": "qwen3_5_moe_text", "layer_types": THREE_LINEAR},
    "qwen4_exp": MIXTURE | QWEN4_EXP | {"layer_types": [*THREE_LINEAR[:3], "indexed_attention"]},
    # What streams and the norm of the gate cost, beside the same mixers and experts.
    "qwen3_5_moe, linear layers": MIXTURE
    | {"model_type": "qwen3_5_moe_text", "layer_types": ["linear_attention"] * 4},
    "qwen4_exp, linear layers": MIXTURE | QWEN4_EXP | {"layer_types": ["linear_attention"] * 4, "ple_layer_ids": []},
}
ARMS = ("per document", "associative scan", "ours")
# Families whose layers run as CUDA graphs with `--graphs`.
GRAPHS = [name for name, options in FAMILIES.items() if family_of(options["model_type"]).has_graphs]
# Families of Mamba mixers, where Transformers has another scan under `torch.compile`.
MAMBA = ("jamba", "mamba", "falcon_mamba", "zamba")
# Families with classes of this package.
OWN = {"qwen3_5", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "kimi_linear, mixture"}
OWN |= {name for name in FAMILIES if name.startswith(("qwen3_5_moe", "qwen4_exp"))}


def arm_of(name: str):
    """A context in which patched models run as the arm says."""
    stack = ExitStack()
    if name not in ("ours", "graphs"):
        stack.enter_context(mock.patch.dict(mixers.ROWS, dict.fromkeys(mixers.ROWS, lambda *args, **kwargs: None)))
    if name == "associative scan":
        for family in MAMBA:
            module = import_module(f"transformers.models.{family}.modeling_{family}")
            scan = torch.compile(inspect.unwrap(module.mamba_selective_scan), dynamic=True)
            stack.enter_context(mock.patch.object(module, "mamba_selective_scan", scan))
    return stack


def make_model(name: str, args, dtype: torch.dtype) -> torch.nn.Module:
    set_seed(0)
    options = FAMILIES[name] | (json.loads(args.options) if args.options else {})
    # flash-linear-attention registers classes of its own for some model types.
    config = getattr(transformers, CONFIG_MAPPING_NAMES[options["model_type"]])(**options)
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def documents_of(tokens: int, count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = split_tokens(generator, count, tokens).tolist()
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def batch_of(documents: list[list[int]], device: str) -> dict:
    collator = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")
    batch = collator([{"input_ids": ids} for ids in documents])
    keep = {name: batch[name].to(device) for name in ("input_ids", "labels", "position_ids")}
    return keep | {"cu_seqlens": batch["cu_seqlens"]}


def step(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def measure(name: str, arm: str, documents: list[list[int]], args) -> dict:
    """Time an arm, whose model lives only here."""
    dispatch._used.clear()
    gpu = args.device == "cuda"
    with arm_of(arm):
        model, batch = patch_model(make_model(name, args, torch.bfloat16)), batch_of(documents, args.device)
        if arm == "graphs":
            use_cuda_graphs(model, graph_length(args.tokens))
        found: dict = {"parameters": model.num_parameters()}
        with tuned_in_threads():
            found["first_ms"] = round(1e3 * timed(lambda: step(model, batch), args.device))
        for _ in range(args.warmup):
            found["loss"] = float(step(model, batch))
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        times = [1e3 * timed(lambda: step(model, batch), args.device) for _ in range(args.repeats)]
        found |= {"median_ms": round(statistics.median(times), 2), "ms": [round(x, 2) for x in times]}
        if gpu:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        found["ran"] = implementations_used()
        if args.profile:
            found["kernels_ms"] = profile(model, batch)
        if arm == "graphs" and not all(map(records_graphs, find_text_models(model))):
            raise RuntimeError("the row ran without a graph; the log says why")
    return found


def profile(model: torch.nn.Module, batch: dict) -> dict[str, float]:
    """The longest kernels of a step, in milliseconds, and the number of all launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step(model, batch)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    longest = {event.key[:90]: round(event.self_device_time_total / 1e3, 3) for event in events[:25]}
    return (
        longest
        | {"all kernels": round(sum(event.self_device_time_total for event in events) / 1e3, 2)}
        | {"launches": sum(event.count for event in events)}
    )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}


def distance(actual: dict, expected: dict) -> float:
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[name] - expected[name]).square().sum()) for name in expected) ** 0.5
    return difference / sum(float(x.square().sum()) for x in expected.values()) ** 0.5


def errors(name: str, args) -> dict:
    """The relative errors of loss and gradients on a short row, and the largest logit error where the documents meet."""
    model = make_model(name, args, torch.bfloat16)
    oracle = copy.deepcopy(model).float()
    documents = documents_of(args.tokens // 4, 8, model.config.get_text_config().vocab_size)
    # A document of one token and one that ends with a chunk have no target or no rest.
    documents = [[5], documents[0][:64] or [6], *documents]
    targets = sum(len(ids) - 1 for ids in documents)
    total = 0.0
    # Without kernels of packages, which round their products.
    with mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True):
        for ids in documents:
            if len(ids) > 1:
                row = torch.tensor([ids], device=args.device)
                loss = oracle(input_ids=row, labels=row, use_cache=False).loss * ((len(ids) - 1) / targets)
                loss.backward()
                total += float(loss.detach())
    expected = gradients(oracle)
    batch, found = batch_of(documents, args.device), {"lengths": [len(ids) for ids in documents]}
    runs = [("per document, bfloat16", "per document", model)] * (name not in OWN)
    runs += [("ours, bfloat16", "ours", model)]
    for label, arm, made in [*runs, *[("ours, float32", "ours", oracle)] * args.float32]:
        with arm_of(arm):
            loss = step(patch_model(made), batch)
        found[label] = {"loss": abs(float(loss) - total) / total, "gradients": distance(gradients(made), expected)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the row")
    parser.add_argument("--documents", type=int, default=20, help="documents of the row, with lognormal lengths")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--options", help="JSON with changes to each configuration")
    parser.add_argument(
        "--graphs", action="store_true", help="add the arm `graphs` to families whose layers can run so"
    )
    parser.add_argument("--no-errors", action="store_true", help="measure no errors")
    parser.add_argument("--float32", action="store_true", help="add the errors of our model in float32")
    parser.add_argument("--profile", action="store_true", help="add the longest kernels of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    report = earlier_report(args.output, machine_name(args.device), parser)
    for name in args.families:
        documents = documents_of(args.tokens, args.documents, FAMILIES[name]["vocab_size"])
        run: dict = {"command": shlex.join(["python", *sys.argv]), "family": name, "config": FAMILIES[name]}
        run |= {"lengths": [len(ids) for ids in documents], "arms": {}}
        report["runs"].append(run)
        arms = [
            arm for arm in args.arms if arm == "ours" or name in MAMBA or (arm == "per document" and name not in OWN)
        ]
        arms += ["graphs"] * (args.graphs and name in GRAPHS)
        for arm in [*arms, *["errors"] * (not args.no_errors)]:
            try:
                found = errors(name, args) if arm == "errors" else measure(name, arm, documents, args)
            except Exception as error:  # The others are worth measuring.
                found = {"failed": f"{type(error).__name__}: {error}"[:500]}
            run["arms" if arm != "errors" else "errors"] = run["arms"] | {arm: found} if arm != "errors" else found
            print(f"{name:<24}{arm:<18}{json.dumps({k: v for k, v in found.items() if k not in ('ms', 'lengths')})}")
            sys.stdout.flush()
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
