"""The numbers that `models/memory.py` says a layer saves for backward, against tensors saved on a CPU.

The kernels of this package run in Triton's interpreter. In place of other kernels, stand-ins save what these save.
"""

import gc
import unittest
from dataclasses import replace
from functools import partial
from importlib import import_module
from unittest import mock

import torch
from common.memory import Memory
from mixins.patch import OTHERS
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3_5TextConfig

from transformers_packed import DataCollatorWithFlattening, SequenceBoundaries, add_mtp, registered
from transformers_packed.boundaries import CHUNK_SIZE
from transformers_packed.models import segments
from transformers_packed.models.families import sizes_of
from transformers_packed.models.memory import Lora, head_memory, layer_memory, loss_memory, segment_memory
from transformers_packed.models.sizes import Attention
from transformers_packed.models.trunk_row import TrunkRow
from transformers_packed.models.versions import can_cut_rows
from transformers_packed.ops import dense_attention
from transformers_packed.ops.dispatch import Implementation
from transformers_packed.parallel import mixers


TOKENS = 16
SEGMENT = 16
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HEADS |= {"head_dim": 32, "num_key_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
UNEVEN = {"linear_key_head_dim": 24, "linear_value_head_dim": 48}
LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
LATENT |= {"linear_num_heads": 4, "linear_head_dim": 32}
DENSE, SPARSE = {"mlp_layer_types": ["dense"] * 2}, {"mlp_layer_types": ["sparse"] * 2, "moe_intermediate_size": 64}
SPARSE |= {"num_local_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "qwen3_5": ("qwen3_5_text", HEADS),
    "qwen3_5_moe": ("qwen3_5_moe_text", HEADS | EXPERTS | {"shared_expert_intermediate_size": 48}),
    "olmo_hybrid": ("olmo_hybrid", UNEVEN),
    "kimi_linear, low rank": ("kimi_linear", LATENT | DENSE | {"q_lora_rank": 40}),
    "kimi_linear, experts": ("kimi_linear", LATENT | SPARSE),
    "bailing_hybrid": ("bailing_hybrid", LATENT | DENSE | {"head_dim": 32}),
}
CONFIGS = {name: given for name, given in CONFIGS.items() if name.startswith(("qwen", *OTHERS))}


class Saves(torch.autograd.Function):
    """A kernel that has computed `output` and saves tensors for its backward."""

    @staticmethod
    def forward(ctx, output, *saved):
        ctx.save_for_backward(*saved)
        return output.view_as(output)


def attend(module, query, key, value, **options):
    """As `varlen_attn`, which takes values of the size of the keys."""
    size = value.shape[-1]
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = torch.randn(query.shape).to(query.dtype).requires_grad_()
    return Saves.apply(output, query, key, value, output)[..., :size], None


def delta_rule(query, key, value, g, beta, **options):
    """As the kernels: rows of one chunk matrix and a cumulative sum, or with a decay by channel of two, and two scales."""
    by_channel, heads = g.ndim == 4, value.shape[2]
    chunks = [value.new_empty(1, TOKENS, heads, CHUNK_SIZE) for _ in range(1 + by_channel)]
    sums = [torch.empty(1, TOKENS, heads) for _ in range(1 + by_channel)]
    output = torch.randn(value.shape).to(value.dtype).requires_grad_()
    tensors = (x.contiguous() for x in (query, key, value, g, beta))
    return Saves.apply(output, *tensors, *chunks, *sums), None


def convolve(hidden_states, weight, bias, activation, **options):
    return Saves.apply(torch.randn(hidden_states.shape).to(hidden_states.dtype).requires_grad_(), hidden_states)


# In place of the kernels of other packages: the op, its table and the kernel.
STAND_INS = {
    ("gated_delta_rule", "IMPLEMENTATIONS"): {"flash_qla": Implementation(delta_rule)},
    ("kimi_delta_rule", "IMPLEMENTATIONS"): {"fla": Implementation(delta_rule)},
    ("convolution", "IMPLEMENTATIONS"): {"fla": Implementation(convolve)},
    ("attention", "IMPLEMENTATIONS"): {"sdpa": {"varlen_attn": Implementation(attend)}},
}


def noted_in(storages):
    """Note the storages that are saved for backward meanwhile, by their addresses."""

    def note(x):
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage
        return x

    return torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)


class SavedTest(InterpretedKernelsTest):
    def saved(self, config, mtp=False) -> list[float]:
        """The bytes that each layer saves per token, without parameters and without what other layers save too.

        The last one is that of a head of multi-token prediction, if there is one.
        """
        with registered():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
        head, row = [add_mtp(model)] if mtp else [], TrunkRow()
        others = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found = []

        def record(layer):
            storages = {}
            found.append(storages)

            def forward(*args, **kwargs):
                others.update(x.untyped_storage().data_ptr() for x in kwargs.get("position_embeddings") or ())
                with noted_in(storages):
                    return type(layer).forward(layer, *args, **kwargs)

            layer.forward = forward

        for layer in (*model.model.layers, *head):
            record(layer)
        ids = torch.arange(1, TOKENS + 1).tolist()
        batch = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(
            [{"input_ids": ids[:10]}, {"input_ids": ids[10:]}]
        )
        for (module, table), stand_in in STAND_INS.items():
            module = import_module(f"transformers_packed.ops.{module}")
            self.enterContext(mock.patch.dict(getattr(module, table), stand_in))
        batch.pop("labels")
        self.assertIsNotNone(model.model(**batch, **{"trunk_row": row} if mtp else {}).last_hidden_state.grad_fn)
        for module in head:
            module(row)
        return [sum(x.nbytes() for place, x in own.items() if place not in others) / TOKENS for own in found]

    @parameterized.expand(CONFIGS)
    def test_a_layer_saves(self, name):
        model_type, options = CONFIGS[name]
        config = CONFIG_MAPPING[model_type](**TINY | options)
        sizes = sizes_of(config)
        for layer, saved in zip(sizes.layers, self.saved(config), strict=True):
            expected = layer_memory(sizes, layer, TOKENS, 1, None)[0] / TOKENS
            # The scales of norms and routers are small beside layers of usual sizes.
            self.assertLess(abs(saved / expected - 1), 0.03)

    @parameterized.expand([name for name in CONFIGS if name.startswith("qwen")])
    def test_a_head_saves(self, name):
        """The loss counts the input of the last norm."""
        model_type, options = CONFIGS[name]
        config = CONFIG_MAPPING[model_type](**TINY | options, mtp_num_hidden_layers=1)
        *_, saved = self.saved(config, mtp=True)
        expected = head_memory(sizes_of(config), TOKENS, 1, None, alone=True)[0] / TOKENS + 2 * config.hidden_size
        self.assertLess(abs(saved / expected - 1), 0.03)

    def test_logits_of_a_short_row(self):
        """They take no more than the gradient of a trained head in its dtype, up to four times as many tokens."""
        sizes = sizes_of(Qwen3_5TextConfig(hidden_size=1024, vocab_size=50_000))
        weight = 50_000 * 1024
        for tokens, rows in ((2048, 1024), (4096, 1024), (8192, 2048), (16384, 3072)):
            states = 8 * 1024 * tokens
            self.assertEqual(loss_memory(sizes, tokens) - states, 4 * weight + 2 * 50_000 * rows)
            self.assertEqual(loss_memory(sizes, tokens, True) - states, 2 * 50_000 * min(rows, 1536))

    @parameterized.expand(CONFIGS)
    def test_the_linear_layers_are_those_of_the_model(self, name):
        model_type, options = CONFIGS[name]
        config = CONFIG_MAPPING[model_type](**TINY | options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        for record, layer in zip(sizes_of(config).layers, model.model.layers, strict=True):
            mixer = next(module for name, module in layer.named_children() if name.endswith("attn"))
            linear = [module for module in mixer.modules() if isinstance(module, torch.nn.Linear)]
            found = sorted((module.in_features, module.out_features) for module in linear)
            self.assertEqual(sorted(record.mixer.linears), found)
            # That of the output last.
            self.assertEqual(record.mixer.linears[-1][1], config.hidden_size)


class Kernel(torch.autograd.Function):
    """A kernel that saves its inputs and other tensors. Its backward returns gradients of all inputs, beside `scratch`."""

    @staticmethod
    def forward(ctx, outputs, saved, scratch, *inputs):
        ctx.save_for_backward(*inputs, *saved)
        ctx.scratch, ctx.number = scratch, len(inputs)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        # Checkpointing frees them as soon as nothing refers to them.
        saved = ctx.saved_tensors
        gc.collect()
        found = [torch.zeros_like(x) for x in saved[: ctx.number]]
        _ = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ctx.scratch]
        return None, None, None, *found


def attend_in_segment(segment, module, query, key, value, impl, **options):
    """As FlashAttention, whose backward makes gradients of keys and values per query head."""
    size = query.shape[1], key.shape[2], query.shape[-1]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scratch = [size, size] if size[0] > key.shape[2] else []
    output = torch.zeros_like(query)
    return Kernel.apply((output,), [output], scratch, query, key, value)[0]


def rule_in_segment(query, key, value, g, beta, initial_state=None, output_final_state=False, **options):
    state, heads = torch.zeros(1, value.shape[2], query.shape[-1], value.shape[-1]), value.shape[:3]
    saved = torch.zeros(*heads, CHUNK_SIZE, dtype=torch.bfloat16), torch.zeros(heads)
    return Kernel.apply((torch.zeros_like(value), state), saved, [], query, key, value, g, beta, initial_state)


@unittest.skipUnless(can_cut_rows(), "needs Transformers 5.24")
class SegmentsTest(InterpretedKernelsTest):
    """A layer that computes a row in segments, from its own input and the gradient of its own output."""

    def layer(self, kind: str, **changes):
        model_type, options = CONFIGS["qwen3_5"]
        config = CONFIG_MAPPING[model_type](
            **TINY | options | {"num_hidden_layers": 1, "layer_types": [kind], **changes}
        )
        with registered():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
        rules = import_module("transformers_packed.ops.gated_delta_rule").IMPLEMENTATIONS
        self.enterContext(mock.patch.dict(rules, {"flash_qla": Implementation(rule_in_segment)}))
        self.enterContext(mock.patch.object(mixers, "attention_of_part", attend_in_segment))
        self.enterContext(mock.patch.object(segments, "_SMALLEST", SEGMENT))
        return model.model, sizes_of(config)

    def backward(self, model, row) -> tuple[int, int]:
        """Bytes after the forward of the layer, and the most bytes in its backward, both without its output."""
        layer, tokens = model.layers[0], row.total_length
        x = torch.zeros(1, tokens, model.config.hidden_size, dtype=torch.bfloat16)
        positions = model.rotary_emb(x, row.position_ids)
        with Memory() as memory:
            x = torch.zeros_like(x).requires_grad_()
            output = layer(x, boundaries=row, position_embeddings=positions, position_ids=None, attention_mask=None)
            # The interpreter's frames hold tensors in cycles.
            gc.collect()
            kept, memory.peak = memory.now, 0
            output.backward(torch.zeros_like(output))
        return kept - output.nbytes, memory.peak - output.nbytes

    @parameterized.expand(TINY["layer_types"])
    def test_a_longer_row_needs(self, kind):
        """Inputs and their gradients, and what crosses the cuts, but no more activations."""
        # Inputs of layers outweigh states, as in large models.
        small = {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        changes = small | {"hidden_size": 128} if kind == "linear_attention" else {}
        model, sizes = self.layer(kind, **changes)
        model.activation_checkpointing_enable({"segment_tokens": SEGMENT, "preserve_rng_state": False})
        # Frozen weights have no gradients.
        model.requires_grad_(False)
        numbers = (6, 9) if kind == "full_attention" else (2, 3)
        rows = [SequenceBoundaries.from_lengths([n * SEGMENT]) for n in numbers]
        # What is derived from boundaries stays from the first backward on. A segment has some bytes more of them.
        _, _, (kept, peak), (more_kept, more_peak) = (self.backward(model, row) for row in 2 * rows)
        given = sizes, sizes.layers[0]
        less, more = (segment_memory(*given, n * SEGMENT, SEGMENT, Lora(mtp_only=True)) for n in numbers)
        inputs = (numbers[1] - numbers[0]) * SEGMENT * 2 * sizes.hidden
        self.assertLess(abs((more_kept - kept) / (inputs + more[2] - less[2]) - 1), 0.1)
        self.assertLess(abs((more_peak - peak) / (inputs + more[1] - less[1]) - 1), 0.06)

    def test_long_segments_read_earlier_keys_where_they_are(self):
        """On Hopper, and in a plan without a GPU. Others join keys, and make gradients per head of queries."""
        sizes = sizes_of(Qwen3_5TextConfig())
        layer = next(layer for layer in sizes.layers if isinstance(layer.mixer, Attention))
        heads, kv_heads, dim = layer.mixer.heads, layer.mixer.kv_heads, layer.mixer.dim

        def made(segment, layer=layer, here=False, hopper=False):
            with (
                mock.patch.object(torch.cuda, "is_available", lambda: here),
                mock.patch.object(dense_attention, "is_supported", lambda: hopper),
            ):
                return segment_memory(sizes, layer, 32 * segment, segment)[1]

        long, short = 2**13, 2**9
        # The last segment but one has 30 earlier ones.
        self.assertEqual(made(long, here=True) - made(long), 30 * long * 2 * 2 * (kv_heads + heads) * dim)
        self.assertEqual(made(long, here=True, hopper=True), made(long))
        self.assertEqual(made(short, here=True), made(short))
        wider = replace(layer, mixer=replace(layer.mixer, dim=2 * dim, value_dim=2 * dim))
        self.assertEqual(made(long, wider, here=True), made(long, wider))

    @parameterized.expand([(False,), (True,)])
    def test_a_short_last_segment(self, hopper):
        """It joins all keys before it, which may take more than a whole segment that reads them where they are."""
        sizes = sizes_of(Qwen3_5TextConfig())
        layer = next(layer for layer in sizes.layers if isinstance(layer.mixer, Attention))
        heads, kv_heads, dim = layer.mixer.heads, layer.mixer.kv_heads, layer.mixer.dim
        segment, cuts = 2**15, 32
        tokens = cuts * segment + 64

        def need(tokens):
            with (
                mock.patch.object(torch.cuda, "is_available", lambda: True),
                mock.patch.object(dense_attention, "is_supported", lambda: hopper),
            ):
                return sum(segment_memory(sizes, layer, tokens, segment, Lora(16))[:2])

        # Keys and values of earlier tokens with their gradients, each in a tensor, and the latter per head of queries too.
        # Their segments have them as well, and so has the input.
        joined = cuts * segment * (2 * 2 * (3 * kv_heads + heads) * dim + 2 * sizes.hidden)
        self.assertLess(joined, need(tokens))
        more = need(tokens) - need(tokens - 64)
        self.assertEqual(more > joined / 10, hopper)

    @parameterized.expand(TINY["layer_types"])
    def test_a_segment_saves(self, kind):
        """When it is computed again: its own activations, and all keys and values of the document up to it."""
        model, sizes = self.layer(kind)
        x = torch.zeros(1, 4 * SEGMENT, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        row = SequenceBoundaries.from_lengths([4 * SEGMENT])
        positions = model.rotary_emb(x, row.position_ids)
        others = {x.untyped_storage().data_ptr() for x in (x, *positions, *model.parameters())}
        found = []

        def checkpoint(function, *args):
            storages = {}
            found.append(storages)

            with noted_in(storages):
                return function(*args)

        model.activation_checkpointing_enable({"segment_tokens": SEGMENT})
        layer, mixer = model.layers[0], sizes.layers[0].mixer
        layer._gradient_checkpointing_func = partial(segments.in_segments, SEGMENT, checkpoint)
        output = layer(x, boundaries=row, position_embeddings=positions, position_ids=None, attention_mask=None)
        self.assertEqual((len(found), output.shape), (4, x.shape))
        alone = segment_memory(sizes, sizes.layers[0], 4 * SEGMENT, SEGMENT)[0]
        for number, storages in enumerate(found):
            saved = sum(x.nbytes() for place, x in storages.items() if place not in others)
            # The state before a segment.
            saved -= 4 * mixer.state if kind == "linear_attention" else 0
            earlier = number * SEGMENT * 2 * 2 * mixer.kv_heads * mixer.dim if kind == "full_attention" else 0
            self.assertLess(abs(saved / (alone + earlier) - 1), 0.04, number)
