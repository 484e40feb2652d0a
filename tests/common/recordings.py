"""Tiny models with CUDA graphs on a CPU, where a recording runs its function again on the same tensors."""

import copy
from contextlib import contextmanager
from unittest import mock

import torch
from common.families import tiny_model
from mixins.model import packed_batch
from mixins.vision import EXPERTS
from scripts.trainer_arms import TINY
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig, set_seed

from transformers_packed import SequenceBoundaries, patch_model, use_cuda_graphs
from transformers_packed.models import cuda_graphs, recordings
from transformers_packed.models.families import family_named
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
from transformers_packed.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM


SIZES = TINY | {
    "vocab_size": 97,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
# Attention between two runs of other layers.
BETWEEN = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
# Tiny models of other families, with their options. A layer of attention is between two of a delta rule.
OTHERS = {
    # A dense layer and two mixtures.
    "kimi_linear": ("kimi_linear", {}),
    "bailing_hybrid": ("bailing_hybrid", {}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    # As in released checkpoints.
    "olmo_hybrid, no positions": ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
}
# Releases of Transformers may lack some.
OTHERS = {name: own for name, own in OTHERS.items() if family_named(own[0]).is_supported}


def other_model(name):
    family, options = OTHERS[name]
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    return patch_model(tiny_model(family, **layers, **options))


MODELS = {
    "attention_between": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES | BETWEEN)),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, mlp_only_layers=[0, 1, 2, 3])),
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SIZES, **EXPERTS)),
}
ROW_LENGTH = 128


class RunsAgain:
    made = replayed = 0

    def __init__(self, function, place):
        RunsAgain.made += 1
        self.function, self.result = function, function()

    def replay(self):
        RunsAgain.replayed += 1
        with torch.enable_grad():
            results = self.function()
        with torch.no_grad():
            for kept, new in zip(self.result, results, strict=True):
                if kept is not None:
                    kept.copy_(new)
        return self.result


def on_the_host(cu_seqlens, total_length):
    """Boundaries for the reference ops, which do not support empty documents."""
    return SequenceBoundaries.from_cu_seqlens(cu_seqlens.unique(), total_length=total_length)


def row_of(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return packed_batch([torch.randint(1, 97, (n,), generator=generator) for n in lengths], "cu_seqlens")


@contextmanager
def recordings_on_a_cpu():
    """Replace the functions that need a GPU."""
    inside = {"_Recording": RunsAgain, "_open_boundaries": on_the_host}
    outside = {"new_place": object, "is_on_gpu": lambda tensor: True}
    with mock.patch.multiple(recordings, **inside), mock.patch.multiple(cuda_graphs, **outside):
        yield


def models_of(name="qwen3_5", **options):
    """Build a model with graphs and one without."""
    set_seed(0)
    plain = (other_model(name) if name in OTHERS else MODELS[name]()).train()
    return use_cuda_graphs(copy.deepcopy(plain), ROW_LENGTH, **options), plain
