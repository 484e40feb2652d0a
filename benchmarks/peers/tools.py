"""The checkpoint of a shape, and what differs among the tools: how they load it, and what they say of their kernels."""

import importlib.util
import sys
from pathlib import Path


def make_checkpoint(name: str, layers: int | None, in_4bit: bool, folder: Path) -> None:
    """Save random weights of a shape, and a tokenizer that no sample needs. In 4 bit, layers are made one by one."""
    import torch
    from pairs import make_tokenizer
    from shapes import MODELS, with_layers
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    config = AutoConfig.for_model(**with_layers(MODELS[name], layers))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta") if in_4bit else device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if in_4bit:
        quantize(model, device)
    # A shard is copied to the host, which may have the folder in memory.
    model.save_pretrained(folder, max_shard_size="5GB")
    # The special words alone.
    make_tokenizer(3).save_pretrained(folder)


def quantize(model, device) -> None:
    """Give a model on the meta device random weights, in NF4 as `transformers-packed train --load-in-4bit` has them."""
    import torch
    from transformers.quantizers import AutoHfQuantizer

    from transformers_packed.models.quantization import initialize_in_4bit, nf4

    config = nf4(torch.bfloat16)
    initialize_in_4bit(model, config, device)
    others = {name.rsplit(".", 1)[-1] for name, x in model.named_modules() if type(x) is torch.nn.Linear}
    config.llm_int8_skip_modules = sorted(others)
    # What `save_pretrained` writes of it, and how.
    model.config.quantization_config = config
    model.hf_quantizer = AutoHfQuantizer.from_config(config)


def load(args):
    """Return the model of the tool, its tokenizer, and the adapters that the trainer has to add, if any."""
    from shapes import LORA_EXPERTS, LORA_LAYERS

    if args.tool == "unsloth":
        import torch
        from unsloth import FastLanguageModel

        # Both calls switch checkpointing on by default, and the first one's choice holds for full fine-tuning.
        checkpointing = {"use_gradient_checkpointing": "unsloth" if args.checkpointing else False}
        model, tokenizer = FastLanguageModel.from_pretrained(
            str(args.checkpoint),
            max_seq_length=args.tokens,
            dtype=torch.bfloat16,
            load_in_4bit=args.load_in_4bit,
            full_finetuning=not args.lora,
            **checkpointing,
        )
        if args.lora:
            own = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
            layers = [name for name in LORA_LAYERS if name in own]
            # With the names of the layers of a shared expert, it adds adapters to all experts.
            model = FastLanguageModel.get_peft_model(
                model, r=16, target_modules=layers, lora_alpha=32, lora_dropout=0, random_state=0, **checkpointing
            )
        return model, tokenizer, None
    # Hides FLA from the stock classes on a machine without a GPU, so it comes before Transformers' models.
    from arms import prepare  # isort: skip
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from transformers_packed.models.quantization import nf4

    attention = None
    if args.tool == "liger":
        if not (installed("flash_attn") and installed("causal_conv1d")):
            prepare(args.device)
        # Torch's needs the boundaries of packed rows.
        instead = "varlen" if args.task == "sft" else "sdpa"
        attention = "flash_attention_2" if installed("flash_attn") else instead
    options = {"quantization_config": nf4(torch.bfloat16)} if args.load_in_4bit else {}
    model = AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.bfloat16, attn_implementation=attention, device_map=args.device, **options
    )
    adapters = None
    if args.lora:
        set_seed(0)
        experts = list(LORA_EXPERTS) if is_mixture(model.config) else None
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=list(LORA_LAYERS), target_parameters=experts)
        if args.task == "sft":
            model, adapters = get_peft_model(model, adapters), None
    return model, AutoTokenizer.from_pretrained(args.checkpoint), adapters


def is_mixture(config) -> bool:
    return getattr(config, "num_experts", None) is not None


def liger_settings(args, config) -> dict:
    if not is_mixture(config):
        return {"use_liger_kernel": True}
    from liger_kernel.transformers.model import output_classes

    # Liger 0.8.5 imports this name, which it defines only for other releases of Transformers.
    vars(output_classes).setdefault("LigerQwen3_5MoeCausalLMOutputWithPast", None)
    return {"use_liger_kernel": True, "liger_kernel_config": {"swiglu": not args.lora}}


def pack(args, trainer) -> None:
    """Set up this package with its defaults. They leave batches of a single document to the stock model."""
    from transformers_packed import configure_packing

    mode = "auto" if args.task == "sft" and args.documents > 1 else "padding_free"
    configure_packing(trainer, mode, float8="float8" in args.tool, share_prompts=args.tool == "ours+shared")


def train_again(model) -> None:
    """Put the model in training mode. Unsloth leaves it ready for generation."""
    model.train()
    if hasattr(model, "for_training"):
        model.for_training(use_gradient_checkpointing=getattr(model, "_unsloth_gradient_checkpointing", False))


def kernels_of(args, trainer) -> dict:
    """What the tool itself says about its kernels."""
    found = {"attention": trainer.model.config._attn_implementation, "collator": type(trainer.data_collator).__name__}
    if args.tool == "unsloth":
        from unsloth.utils.hf_packed_attention import HF_PACKED_ATTENTION_STATS
        from unsloth.utils.packing import HYBRID_PACKING_STATS
        from unsloth_zoo.temporary_patches.gdn_causal_conv1d import GDN_CAUSAL_CONV1D_STATS

        # Unsloth raises an error in the first packed forward if a layer did not hand boundaries to its kernels.
        done = getattr(trainer.model, "_unsloth_varlen_handshake_done", False)
        return found | {
            "padding_free": getattr(trainer.args, "padding_free", None),
            "boundaries_reached_kernels": done,
            "hybrid_packing": dict(HYBRID_PACKING_STATS),
            "packed_attention": dict(HF_PACKED_ATTENTION_STATS),
            "convolution": dict(GDN_CAUSAL_CONV1D_STATS),
            # Its own copy of FLA is older than 0.6.
            "fla": getattr(sys.modules.get("fla"), "__version__", None),
        }
    if args.tool.startswith("ours"):
        from transformers_packed.ops import implementations_used

        return found | {"implementations": implementations_used()}
    return found


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
