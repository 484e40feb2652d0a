"""Forward and backward of one training step on a GPU: what users have today against this package.

Every arm gets the same samples and the same random weights, in bfloat16: padded batches of `--batch` for the padded arms,
one packed row for the others. The arms take turns, so that a change of the machine's speed meets all of them, and
each counts with the median of its steps after a warm-up. The steps of an arm follow one another as in training: nobody waits
for the GPU between them, and events on it take the times. The built-in classes need `causal_conv1d` for packed rows; they
get flash-linear-attention's convolution in its place, and `varlen` is torch's variable-length attention, which
Transformers does not offer by itself.

The share of the machine is the model's FLOPs (three times the forward's, attention inside documents only, the head for
every token) over the time, against the best matrix product that the machine itself manages: once by itself, and once
repeated for seconds, as in a step, when the GPU's power limit lowers its clock.

    python benchmarks/step.py --models 0.8B 4B --tokens 16384 --output benchmarks/results/step.json
    python benchmarks/step.py --models 0.8B --tokens 16384 --arms ours --profile
    python benchmarks/step.py --models 4B --arms ours ours+lora packed+varlen+liger+lora --output benchmarks/results/lora.json
    python benchmarks/step.py --plot benchmarks/results/step.json step.png
"""

import argparse
import gc
import json
import platform
import re
import shlex
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import torch


if not torch.cuda.is_available():
    # Where these can be imported, the built-in classes would run them on the CPU, which fails.
    sys.modules |= dict.fromkeys(("fla", "causal_conv1d"))

import transformers
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3_5TextConfig, set_seed
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed import DataCollatorWithFlattening, use_cuda_graphs
from transformers_packed.models.quantization import SENSITIVE
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.ops import implementations_used


COMMON = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "pad_token_id": 0,
    "use_cache": False,
}
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "linear_num_value_heads", "tie_word_embeddings",
)  # fmt: skip
MODELS = {
    name: COMMON | dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "tiny": (64, 128, 4, 2, 1, 4, True),
        "0.8B": (1024, 3584, 24, 8, 2, 16, True),
        "2B": (2048, 6144, 24, 8, 2, 16, True),
        "4B": (2560, 9216, 32, 16, 4, 32, True),
        "9B": (4096, 12288, 32, 16, 4, 32, False),
    }.items()
}
# For a CPU.
MODELS["tiny"] |= {
    "vocab_size": 2048,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
}
# Name: class, packed or not, attention, Liger, FlashQLA.
ARMS = {
    "padded": ("builtin", False, "sdpa", False, True),
    "padded+liger": ("builtin", False, "sdpa", True, True),
    "packed": ("builtin", True, "sdpa", False, True),
    "packed+varlen": ("builtin", True, "varlen", False, True),
    "packed+varlen+liger": ("builtin", True, "varlen", True, True),
    "packed+varlen+liger-flashqla": ("builtin", True, "varlen", True, False),
    "ours": ("ours", True, "sdpa", False, True),
    "ours+graphs": ("ours", True, "sdpa", False, True),
    "ours padded": ("ours", False, "sdpa", False, True),
}
# LoRA as Trainer runs it: float32 adapters of rank 16 on all linear layers, bfloat16 weights, autocast.
ARMS |= {f"{name}+lora": ARMS[name] for name in ("packed+varlen+liger", "ours", "ours+graphs")}
# The same with weights in NF4, and after PEFT's `prepare_model_for_kbit_training`.
ARMS |= {f"{name}+qlora": ARMS[name] for name in ("packed+varlen+liger", "ours")}
ARMS["ours+qlora+prepared"] = ARMS["ours"]
LORA_LAYERS = (
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
PACKAGES = (
    "flash-linear-attention",
    "peft",
    "bitsandbytes",
    "flash-qla",
    "tilelang",
    "causal-conv1d",
    "liger-kernel",
    "triton",
)
# Kernels by name; the first that matches counts.
GROUPS = {
    "gated delta rule": r"gdr|gdn|gated_delta|chunk_|kkt|wy_|cumsum|l2norm|prepare_h|group_reduce|decay",
    "convolution": r"conv",
    "attention": r"flash_fwd|flash_bwd|flash::|fmha|attention|rotary",
    "loss": r"softmax_minus|cross_entropy|nll|log_softmax|liger_cross",
    "norms and gates": r"norm|rms|_gate_|swiglu|silu",
    "matmul": r"gemm|nvjet|cutlass|xmma|wgmma|sm90_|matmul|cublas",
}


def sample_lengths(distribution: str, tokens: int, seed: int = 0) -> list[int]:
    """Document lengths that add up to `tokens`: lognormal with mean 480, or all 512."""
    if distribution == "equal":
        return [512] * (tokens // 512)
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < tokens:
        length = int((torch.randn((), generator=generator) * 0.8 + 5.85).exp())
        lengths.append(min(max(length, 8), tokens - sum(lengths)))
    return lengths


def model_flops(config: dict, lengths: list[int], frozen: bool = False) -> float:
    """FLOPs of forward and backward: products with weights, the delta rule's recurrence, attention in documents, the head.

    Frozen weights need no gradient, which is a third of their products. The products of adapters are left out.
    """
    hidden, inner, tokens = config["hidden_size"], config["intermediate_size"], sum(lengths)
    value_heads, key_heads, dim = (
        config["linear_num_value_heads"],
        config["linear_num_key_heads"],
        config["linear_key_head_dim"],
    )
    linear = 2 * (
        hidden * (2 * key_heads * dim + 2 * value_heads * dim + 2 * value_heads) + value_heads * dim * hidden
    )
    recurrence = 8 * (2 * key_heads * dim + value_heads * dim) + 8 * value_heads * dim**2
    heads, key_value_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    full = 2 * hidden * head_dim * (3 * heads + 2 * key_value_heads)
    within = 4 * heads * head_dim * sum(n * n for n in lengths) / 2
    mlp = 6 * hidden * inner
    layers = config["num_hidden_layers"]
    weights = layers * mlp + layers * 3 // 4 * linear + layers // 4 * full + 2 * hidden * config["vocab_size"]
    rest = layers * 3 // 4 * recurrence * tokens + layers // 4 * within
    return (2 if frozen else 3) * weights * tokens + 3 * rest


# Of an arm at least: caches of the host and the GPU's clock settle.
_WARM_UP_SECONDS = 2.0
_SUSTAINED_SECONDS = 1.0


def gemm_rates(device: str) -> dict[str, float]:
    """FLOP/s of the best of a few large bfloat16 products, each by itself, and repeated for seconds."""
    shapes = ((8192, 8192, 8192), (16384, 4096, 4096), (16384, 8192, 4096)) if device == "cuda" else ((512,) * 3,)
    rates = {"gemm_flops_per_second": 0.0, "sustained_gemm_flops_per_second": 0.0}
    for m, n, k in shapes:
        a, b = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        for _ in range(3):
            a @ b
        seconds = min(timed(lambda a=a, b=b: a @ b, device) for _ in range(10))
        rates["gemm_flops_per_second"] = max(rates["gemm_flops_per_second"], 2 * m * n * k / seconds)
    m, n, k = shapes[0]
    a, b = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    product = a @ b
    repeats = max(1, int(_SUSTAINED_SECONDS * rates["gemm_flops_per_second"] / (2 * m * n * k)))

    def again():
        for _ in range(repeats):
            torch.mm(a, b, out=product)

    # The second one finds the GPU as warm as a step does.
    seconds = [timed(again, device) for _ in range(2)][1]
    rates["sustained_gemm_flops_per_second"] = 2 * m * n * k * repeats / seconds
    return rates


def seconds_of_steps(arm: "Arm", repeats: int, device: str) -> list[float]:
    if device != "cuda":
        return [timed(arm.run, device) for _ in range(repeats)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        arm.run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(events, events[1:], strict=False)]


def timed(function, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def varlen(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """Transformers' attention interface over `varlen_attn`."""
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    rows = (x.transpose(1, 2)[0] for x in (query, key, value))
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(*rows, *ends, scale=scaling, window_size=(-1, 0), **grouped)[None], None


def flas_convolution(hidden_states, weight, bias=None, activation=None, seq_idx=None, cu_seq_lens_q=None, **kwargs):
    """The signature that the built-in block calls, channels first, over flash-linear-attention's kernel."""
    from fla.modules.causal_conv1d import causal_conv1d

    rows = hidden_states.transpose(1, 2)
    return causal_conv1d(rows, weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)[0].transpose(1, 2)


def make_model(config: dict, arm: str, device: str):
    kind, _, attention, liger, _ = ARMS[arm]
    set_seed(0)
    cls = Qwen3_5ForCausalLM if kind == "ours" else builtin.Qwen3_5ForCausalLM
    with torch.device(device):
        model = cls._from_config(Qwen3_5TextConfig(**config), dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if attention != "sdpa":
        model.set_attn_implementation(attention)
    if liger:
        from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_qwen3_5

        originals = builtin.Qwen3_5RMSNorm, builtin.Qwen3_5MLP
        apply_liger_kernel_to_qwen3_5(model=model)
        # It also replaces the classes, which the other arms are made of.
        builtin.Qwen3_5RMSNorm, builtin.Qwen3_5MLP = originals
    if "+qlora" in arm:
        quantize(model)
    return with_lora(model, "+prepared" in arm) if "lora" in arm else model


def quantize(model: torch.nn.Module) -> None:
    """Replace the layers that `from_pretrained` would replace, with double quantization."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name in [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]:
        layer = model.get_submodule(name)
        if name.endswith(("lm_head", *SENSITIVE)):
            continue
        size = layer.in_features, layer.out_features
        new = Linear4bit(*size, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=new)
        new.weight = weight.to(layer.weight.device)
        model.set_submodule(name, new)
    model.is_loaded_in_4bit = True


def with_lora(model: torch.nn.Module, prepared: bool) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if prepared:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=list(LORA_LAYERS)))
    for name, parameter in model.named_parameters():
        # Products with zeros take less power, and the GPU's clock depends on it.
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def make_batches(lengths: list[int], vocab_size: int, arm: str, batch_size: int, device: str) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, vocab_size, (n,), generator=generator) for n in lengths]
    kind, packed, *_ = ARMS[arm]
    to = lambda batch: {k: x.to(device) if torch.is_tensor(x) else x for k, x in batch.items()}  # noqa: E731
    if packed:
        # What the built-in classes read on the device as well; ours take the host's copy of `cu_seqlens`.
        collator = DataCollatorWithFlattening(
            return_cu_seqlens=True, return_seq_idx=True, return_flash_attn_kwargs=True, on_leak="ignore"
        )
        batch = collator([{"input_ids": x.tolist()} for x in documents])
        if kind == "ours":
            keep = ("input_ids", "labels", "position_ids")
            return [to({k: batch[k] for k in keep}) | {"cu_seqlens": batch["cu_seqlens"]}]
        batch.pop("cu_seqlens")
        return [to(batch)]
    batches = []
    for start in range(0, len(documents), batch_size):
        rows = documents[start : start + batch_size]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in rows], batch_first=True)
        batches.append(to({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}))
    return batches


class Arm:
    """A model with its batches; `step()` is forward and backward over all of them."""

    def __init__(self, name: str, config: dict, lengths: list[int], args):
        self.name, self.targets, self.device = name, sum(lengths) - len(lengths), args.device
        self.model = make_model(config, name, args.device)
        if args.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if "+graphs" in name:
            use_cuda_graphs(self.model, -(-sum(lengths) // 64) * 64)
        self.batches = make_batches(lengths, config["vocab_size"], name, args.batch, args.device)
        self.use_flash_qla = ARMS[name][4]

    def step(self) -> float:
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for batch in self.batches:
            with torch.autocast(self.device, torch.bfloat16, enabled="lora" in self.name):
                loss = self.model(**batch, num_items_in_batch=self.targets).loss
            loss.backward()
            total = total + loss.detach()
        return total

    def run(self) -> float:
        # FLA looks for the other package in each call.
        original = builtin.torch_chunk_gated_delta_rule
        if not self.use_flash_qla:
            builtin.torch_chunk_gated_delta_rule = without_flash_qla
        try:
            return self.step()
        finally:
            builtin.torch_chunk_gated_delta_rule = original


def without_flash_qla(*args, **kwargs):
    from inspect import signature, unwrap

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kernel = unwrap(chunk_gated_delta_rule)
    known = signature(kernel).parameters
    return kernel(*args, **{name: value for name, value in kwargs.items() if name in known})


def measure(model: str, distribution: str, tokens: int, args, rates: dict[str, float]) -> dict:
    """All arms on one model and one set of samples; each arm's model lives only while it runs, to measure its memory."""
    config, lengths = MODELS[model], sample_lengths(distribution, tokens)
    results = {}
    for round_number in range(args.rounds):
        for name in args.arms:
            try:
                arm = Arm(name, config, lengths, args)
                steps, begin = args.warmup if round_number == 0 else 2, time.perf_counter()
                while steps > 0 or (args.device == "cuda" and time.perf_counter() - begin < _WARM_UP_SECONDS):
                    loss = float(arm.run())
                    steps -= 1
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds = seconds_of_steps(arm, args.repeats, args.device)
                entry = results.setdefault(name, {"seconds": [], "loss": loss})
                entry["seconds"] += [round(x, 5) for x in seconds]
                if args.device == "cuda":
                    peak = torch.cuda.max_memory_allocated()
                    if "+graphs" in name:
                        # What graphs keep for their activations does not count as allocated.
                        torch.cuda.empty_cache()
                        peak += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
                    entry["peak_GiB"] = round(peak / 2**30, 2)
                if args.profile:
                    entry["profile_ms"] = profile(arm)
                del arm
            except torch.OutOfMemoryError:
                results[name] = {"error": "out of memory"}
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    for name, entry in results.items():
        if "seconds" in entry:
            flops, median = model_flops(config, lengths, "lora" in name), statistics.median(entry["seconds"])
            entry |= {
                "median_ms": round(1000 * median, 2),
                "tokens_per_second": round(tokens / median),
                "share_of_gemm_rate": round(flops / median / rates["gemm_flops_per_second"], 4),
                "share_of_sustained_gemm_rate": round(flops / median / rates["sustained_gemm_flops_per_second"], 4),
            }
    ours = results.get("ours", {}).get("median_ms")
    for entry in results.values():
        if ours and "median_ms" in entry:
            entry["over_ours"] = round(entry["median_ms"] / ours, 3)
    print_table(model, distribution, tokens, lengths, results)
    return {
        "model": model,
        "lengths": distribution,
        "documents": len(lengths),
        "tokens": tokens,
        "checkpointing": args.checkpointing,
        "flops": model_flops(config, lengths),
        "arms": results,
    }


def profile(arm: Arm) -> dict[str, float]:
    """Milliseconds of kernels by group, of all kernels, and of the host until it has launched everything."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    arm.run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    arm.run()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        arm.run()
        torch.cuda.synchronize()
    groups, rest = dict.fromkeys([*GROUPS, "other", "all kernels"], 0.0), {}
    launches = 0
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        milliseconds = event.device_time / 1000
        launches += 1
        group = next((g for g, pattern in GROUPS.items() if re.search(pattern, event.name.lower())), "other")
        groups[group] += milliseconds
        groups["all kernels"] += milliseconds
        rest[event.name] = rest.get(event.name, 0.0) + milliseconds
    for name, milliseconds in sorted(rest.items(), key=lambda item: -item[1])[:40]:
        print(f"    {milliseconds:8.2f} ms  {name[:110]}")
    return {k: round(v, 2) for k, v in groups.items()} | {"host": round(1000 * host, 2), "launches": launches}


def print_table(model: str, distribution: str, tokens: int, lengths: list[int], results: dict) -> None:
    print(f"\n{model}, {tokens:,} tokens in {len(lengths)} documents ({distribution})")
    for name, entry in results.items():
        if "error" in entry:
            print(f"  {name:<30} {entry['error']}")
            continue
        print(
            f"  {name:<30} {entry['median_ms']:9.1f} ms  {entry['tokens_per_second']:>9,} tokens/s"
            f"  {100 * entry['share_of_gemm_rate']:5.1f} % ({100 * entry['share_of_sustained_gemm_rate']:.1f} %)"
            f"  {entry.get('peak_GiB', 0):6.1f} GiB"
            f"  x {entry.get('over_ours', 0):5.2f}  loss {entry['loss']:.4f}"
        )
        if "profile_ms" in entry:
            print("    " + ", ".join(f"{k} {v}" for k, v in entry["profile_ms"].items()), flush=True)


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = json.loads(source.read_text())["runs"]
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 2.4 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    for axis, run in zip(axes.flat, runs, strict=False):
        arms = {name: entry["median_ms"] for name, entry in run["arms"].items() if "median_ms" in entry}
        colors = ["tab:green" if name.startswith("ours") else "tab:gray" for name in arms]
        bars = axis.barh(list(arms), list(arms.values()), color=colors, height=0.6)
        axis.bar_label(bars, fmt="{:,.0f}", padding=2)
        axis.margins(x=0.2)
        axis.set_ylim(len(arms) - 0.5, -0.5)
        checkpointing = ", checkpointing" if run["checkpointing"] else ""
        axis.set_title(f"{run['model']}, {run['tokens']:,} tokens, {run['lengths']}{checkpointing}", fontsize=9)
        axis.set_xlabel("milliseconds, forward + backward", fontsize=8)
    figure.savefig(target, dpi=130)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def earlier_report(output: Path | None, machine: str, parser: argparse.ArgumentParser) -> dict:
    """What the JSON file holds of this machine and these versions, to add runs to; a new report if there is no file."""
    report = {"machine": machine, "versions": versions(), "runs": []}
    if output and output.exists():
        earlier = json.loads(output.read_text())
        if any(earlier[key] != report[key] for key in ("machine", "versions")):
            parser.error(f"{output} holds runs of another machine or of other versions; name another file")
        report = earlier
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.8B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384], help="tokens of the row")
    parser.add_argument("--lengths", nargs="+", choices=("lognormal", "equal"), default=["lognormal"])
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=[n for n in ARMS if n != "ours padded" and "lora" not in n]
    )
    parser.add_argument("--batch", type=int, default=8, help="rows of a padded batch")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of an arm in each round")
    parser.add_argument("--rounds", type=int, default=2, help="how often the arms take turns")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in every arm")
    parser.add_argument("--profile", action="store_true", help="kernel time by group, and the host's time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("JSON", "PNG"), help="only draw an earlier run")
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return 0
    AttentionInterface.register("varlen", varlen)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)
    if args.device == "cuda":
        builtin.causal_conv1d_fn = flas_convolution
    rates = gemm_rates(args.device)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    once, sustained = (rate / 1e12 for rate in rates.values())
    print(f"{machine}, best matrix product {once:.1f} TFLOP/s, for seconds {sustained:.1f} TFLOP/s", versions())
    report = earlier_report(args.output, machine, parser)
    for model in args.models:
        for tokens in args.tokens:
            for distribution in args.lengths:
                run = {"command": shlex.join(["python", *sys.argv])} | rates
                run |= measure(model, distribution, tokens, args, rates)
                report["runs"].append(run | {"implementations": implementations_used()})
                if args.output:
                    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(implementations_used())
    return 0


if __name__ == "__main__":
    sys.exit(main())
