"""Audit models with released shapes and random bfloat16 weights on a GPU, for the installed set of kernels.

Run `python benchmarks/audit_gpu.py --output benchmarks/results/audit_gpu.json` once per set of installed kernels. Each
run adds or replaces one entry in the file. The exit status is 1 if a model of this package leaks.
"""

import argparse
import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

import torch
import transformers
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig, set_seed

from transformers_packed import audit_model
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
from transformers_packed.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM
from transformers_packed.ops import dispatch, implementations_used


# Attention and linear attention have the released sizes. Experts are small because the audit copies expert weights for
# each token, so that no result depends on the number of tokens per expert.
QWEN3_5_08B = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
MODELS = {
    "Qwen3.5 0.8B": (Qwen3_5ForCausalLM, transformers.Qwen3_5ForCausalLM, Qwen3_5TextConfig, QWEN3_5_08B),
    "Qwen3.5-MoE": (Qwen3_5MoeForCausalLM, transformers.Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, EXPERTS),
    "Qwen3-Next": (Qwen3NextForCausalLM, transformers.Qwen3NextForCausalLM, Qwen3NextConfig, EXPERTS),
}
KERNELS = ("flash-linear-attention", "flash-qla", "causal-conv1d", "flash-attn", "triton")
# Documents of one token up to many chunks.
LENGTHS = [65, 1, 1500, 3, 63, 2, 64, 700, 130]


def audit(name: str, ours: bool, attention: str, device: str) -> dict:
    own, builtin, config_class, values = MODELS[name]
    set_seed(0)
    config = config_class(**values, pad_token_id=0)
    cls = own if ours else builtin
    with torch.device(device):
        model = cls._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if attention != "sdpa":
        model.set_attn_implementation(attention)
    dispatch._used.clear()
    report = audit_model(model, lengths=LENGTHS)
    used = implementations_used()
    print(report.table(), used, sep="\n", end="\n\n", flush=True)
    return {"model": name, "implementations": used, "report": json.loads(report.to_json())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file that receives the entry for this set of kernels")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--attn", nargs="+", default=["sdpa", "flex_attention"], help="attention implementations")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for package in KERNELS:
        try:
            machine[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    label = "+".join(name for name in KERNELS if name in machine)
    results = []
    runs = [(name, True, attention) for attention in args.attn for name in args.model]
    runs += [(name, False, "sdpa") for name in args.model]
    for run in runs:
        results.append(audit(*run, args.device))
        torch.cuda.empty_cache()
        if args.output:
            entries = json.loads(args.output.read_text()) if args.output.exists() else {}
            entries[label] = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "results": results}
            args.output.write_text(json.dumps(entries, indent=1) + "\n")
    for result in results:
        report = result["report"]
        verdicts = {source: values["verdict"] for source, values in report["sources"].items()}
        print(f"{report['model']:<48} {report['settings']['attention']:<16} {verdicts}")
    reports = [result["report"] for result in results]
    return 0 if all(report["ok"] for report in reports if report["model"].startswith("transformers_packed")) else 1


if __name__ == "__main__":
    sys.exit(main())
