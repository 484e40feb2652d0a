"""What `fuzz.py` draws: a set-up, the families of its model and the PEFT methods."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import peft
import transformers
from common.families import tiny_config
from mixins.vision import TEXT, vision_config


_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_SHARED = {"shared_expert_intermediate_size": 16}
FAMILIES: dict[str, Callable] = {
    "qwen3_next": lambda: tiny_config("qwen3_next", **_LAYERS, **_SHARED, mlp_only_layers=[0]),
    "qwen3_5": lambda: tiny_config("qwen3_5_text", **_LAYERS),
    "qwen3_5_vl": lambda: transformers.Qwen3_5Config(**vision_config({**TEXT, "initializer_range": 0.15})),
    "qwen3_5_moe": lambda: tiny_config("qwen3_5_moe_text", **_LAYERS, **_SHARED),
    "lfm2": lambda: tiny_config("lfm2"),
    "llama": lambda: tiny_config("llama"),
    "qwen3": lambda: tiny_config("qwen3"),
}
STOCK = ("llama", "qwen3")  # families that keep documents apart by Transformers' masks
GENERIC = {"lfm2": ".conv"}  # families whose mixers, of this name, run on each document alone
CONFIGURED = ("configure", "packed_trainer")  # ways that use `configure_packing`
_LORA = {"r": 2, "init_lora_weights": False}
PEFT: dict[str, Callable] = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj"], **_LORA),
    "lora_all": lambda: peft.LoraConfig(target_modules="all-linear", **_LORA),
    "lora_save": lambda: peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["lm_head", "q_norm"], **_LORA),
    "lora_embedding": lambda: peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], **_LORA),
    "lora_experts": lambda: peft.LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"], **_LORA),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], use_dora=True, **_LORA),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["q_norm", "k_norm"]),
    "norms_of_layers": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "linear_attn.norm"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj", "out_proj"], init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=["k_proj", "gate_proj"], init_weights=False),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=["v_proj", "up_proj"], init_weights=False),
    "trainable_tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5, 8], target_modules=["embed_tokens"]),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p_tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@dataclass(frozen=True)
class Setup:
    """One set-up. The defaults are the simplest one."""

    seed: int
    family: str = "qwen3_5"
    # How packing is enabled: `register`, `patch`, `configure`, `packed_trainer`, or `stock` (a collator only).
    way: str = "patch"
    # `auto`, `padding_free` or `pack` for ways that use `configure_packing`; `padded` batches or `rows` otherwise.
    mode: str = "rows"
    collator: dict = field(default_factory=dict)
    mask: str = ""  # of the user's own collator: see `fuzz_data.ROWS` and `fuzz_data.PADDED`
    mask_options: dict = field(default_factory=dict)  # arguments of `fuzz_data.collate_rows`
    padding: str = ""  # inside of the samples: `left` or `right`
    empty: bool = False  # whether one sample is empty
    # `trainer`, or a custom training loop: `plain`, `ddp`, `accelerate`.
    loop: str = "trainer"
    attention: str = "sdpa"
    checkpointing: str = ""
    peft: str = ""
    changes: tuple[tuple[str, str], ...] = ()  # (kind, module)
    late: bool = False  # whether the changes follow the enabling of packing
    config: dict = field(default_factory=dict)
    batch_size: int = 3
    accumulation: int = 1
    steps: int = 2
    bf16: bool = False
    # `loss`, `predictions`, `inputs`, which also go to the metrics, or `predict` instead of `evaluate`.
    evaluation: str = ""
    eval_rows: str = "samples"  # or `rows` of `PackingDataset`, or `packed` by `pack_dataset`
    eval_batch_size: int = 8
    own: str = ""  # what the user overrides: see `fuzz_own.OWN`
    kept: str = ""  # what the user keeps between calls: see `fuzz_own.KEPT`
    stream: bool = False  # whether the samples are a stream that can be read once
    arguments: dict = field(default_factory=dict)

    def __str__(self) -> str:
        plain = Setup(self.seed)
        drawn = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        }
        return " ".join(f"{name}={value!r}" for name, value in drawn.items())
