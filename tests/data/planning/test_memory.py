"""The plan of `transformers-packed memory`: its formulas against measurements, the exchanged bytes, and its page."""

import contextlib
import unittest
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import peft
import torch
import torch.distributed as dist
from common.families import tiny_config
from common.fused import saved_in
from common.matrices import is_hidden
from common.processes import EXPERTS, run_once
from common.sizes import SIZES, in_fp8, quantized
from mixins.triton import InterpretedKernelsTest
from mixins.vision import TEXT, vision_config
from parameterized import parameterized
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    set_seed,
)

from transformers_packed import (
    DataCollatorWithFlattening,
    add_mtp,
    keep_experts_in_host_memory,
    keep_layers_in_host_memory,
    registered,
)
from transformers_packed.cli.models import untrained_model, with_adapters
from transformers_packed.data.planning.exchanges import exchanges
from transformers_packed.data.planning.memory import plan_sequence_parallel
from transformers_packed.data.planning.step_memory import Parameters, checkpointed_layers, step_memory
from transformers_packed.models import host_parameters
from transformers_packed.models import memory as memory_of_models
from transformers_packed.models.checkpoint_kinds import stored_as
from transformers_packed.models.families import SIZED, sizes_of
from transformers_packed.models.host_experts import bytes_in_host_memory
from transformers_packed.models.memory import ALL_TRAINED, NF4, Lora, layer_memory
from transformers_packed.models.mtp_head import MtpHead
from transformers_packed.models.optimizers import DEFAULT, OPTIMIZERS
from transformers_packed.models.quantization import initialize_in_4bit, nf4
from transformers_packed.models.quantized_weights import ExpertsIn4bit, set_weights
from transformers_packed.models.qwen3_5 import modeling_qwen3_5
from transformers_packed.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers_packed.models.sizes import Experts
from transformers_packed.models.versions import can_select_checkpoints, joins_stored_experts
from transformers_packed.ops import experts
from transformers_packed.ops.terms import Adapter
from transformers_packed.parallel import SequenceParallel, shard_batch


ROOT = Path(__file__).parents[3]
GIB, MIB = 2**30, 2**20
SIZED_NAMES = {family.name for family in SIZED}
SMALL = {**TEXT, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}


SPREAD = {"config": Qwen3_5MoeTextConfig(), "expert_parallel": 2, "memory": 141}
# Model and methods.
EXCHANGES = {
    "states and heads": ("dense", {"attention": "heads"}, (2, 4)),
    "heads": ("dense", {"gated_delta_rule": "heads", "attention": "heads"}, (2,)),
    "gather": ("dense", {"attention": "gather"}, (2, 4)),
    "experts": ("experts", {"attention": "heads"}, (2, 4)),
}


def make_model(name):
    set_seed(0)
    if name == "dense":
        model = modeling_qwen3_5.Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL))
    else:
        model = modeling_qwen3_5_moe.Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SMALL, **EXPERTS))
        model.set_experts_implementation("eager")
    return model.to(torch.bfloat16).train()


def count_received(size):
    """Return the bytes received from other ranks in a forward and its backward."""
    counted = 0

    def counting(function, of_others):
        def call(received, sent, *args, **kwargs):
            nonlocal counted
            counted += of_others(received.nbytes, sent.nbytes)
            return function(received, sent, *args, **kwargs)

        return call

    patches = {
        "all_gather_into_tensor": lambda received, sent: received - sent,
        "reduce_scatter_tensor": lambda received, sent: sent - received,
        "all_to_all_single": lambda received, sent: received * (size - 1) // size,
    }
    results = {}
    with contextlib.ExitStack() as stack:
        for name, of_others in patches.items():
            stack.enter_context(mock.patch.object(dist, name, counting(getattr(dist, name), of_others)))
        for case, (name, methods, sizes) in EXCHANGES.items():
            if size not in sizes:
                continue
            parallel, model = SequenceParallel(size, **methods), make_model(name)
            # Cut into short pieces, into two parts as into four.
            documents = [{"input_ids": [1 + n for n in range(length)]} for length in (10, 4, 8, 4, 8, 4, 10)]
            batch = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(documents)
            inputs = shard_batch(batch, parallel.rank, size, parallel=parallel)
            counted = 0
            loss = model(**inputs, num_items_in_batch=47).loss
            forward, counted = counted, 0
            loss.backward()
            results[case] = forward, counted
    return results


def bytes_of_a_step(model):
    """The bytes of all weights, of the gradients, and of the moments of AdamW after a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    return tuple(sum(x.nbytes for x in part) for part in (model.parameters(), [x.grad for x in trained], moments))


# The rows of a table in the documentation.
LORA, QLORA = ({"weights": "bfloat16", "lora_rank": 16, "load_in_4bit": in_4bit} for in_4bit in (False, True))
CHOICES = {
    "all weights, AdamW in float32": {"weights": "float32"},
    "all weights, flash_adamw": {"weights": "bfloat16", "optimizer": "flash_adamw"},
    "all weights, flash_adamw_release": {"weights": "bfloat16", "optimizer": "flash_adamw_release"},
    "LoRA": LORA,
    "LoRA, segments of 8,192 tokens": {**LORA, "segment_tokens": 8192},
    "LoRA, layers in host memory": {**LORA, "layers_in_host_memory": True},
    "QLoRA": QLORA,
    "QLoRA, layers in host memory": {**QLORA, "layers_in_host_memory": True},
}


class FormulaeTest(unittest.TestCase):
    @parameterized.expand([(f"{case}, {size}", case, size) for case, (_, _, s) in EXCHANGES.items() for size in s])
    def test_counts_what_is_exchanged(self, _, case, size):
        name, methods, _ = EXCHANGES[case]
        expected = sum(e.layers * e.bytes for e in exchanges(make_model(name).config, 48, size, **methods))
        for results in run_once(count_received, size, size):
            self.assertEqual(results[case], (expected, expected))

    @parameterized.expand([(8, 1), (8, 8), (64, 1), (64, 8), (64, 64), (512, 1), (512, 8), (512, 64)])
    def test_experts_over_gpus_on_paper(self, gpus, spread):
        """Weights that are gathered, and tokens that travel, counted for each expert and choice."""
        large = {"hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32, "linear_num_value_heads": 64}
        large |= {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024}
        found = [self.bytes_on_paper(Qwen3_5MoeTextConfig(**sizes), gpus, spread) for sizes in ({}, large)]
        gathered, travels = zip(*found, strict=True)
        cells = [f"{x / GIB:,.0f}" for x in (*gathered, *travels)]
        row = f"| {gpus} | {spread} | {cells[0]} | {cells[2]} | {cells[1]} | {cells[3]} |"
        self.assertIn(row, (ROOT / "docs/how_to/experts_and_tensors.md").read_text())

    def bytes_on_paper(self, config, gpus, spread):
        """Those that a GPU receives in a step, for weights and gradients and for tokens of its experts."""
        plan = plan_sequence_parallel(config, 2**14, gpus, 1000, expert_parallel=spread)
        number, layers, hidden = config.num_experts, config.num_hidden_layers, config.hidden_size
        own = layers * number // spread * 3 * hidden * config.moe_intermediate_size
        rest = plan.parameters.total - own * spread
        # A GPU has a part of what its group gathers: all GPUs for the rest, and those with the same experts.
        gathered = 2 * (rest * (gpus - 1) / gpus + own * (gpus // spread - 1) / (gpus // spread))
        away = 2**14 * config.num_experts_per_tok * (spread - 1) / spread
        travels = 2 * away * 2 * hidden
        text = plan.summary()
        self.assertIn(f"{gathered / MIB:,.1f} MiB of weights in forward", text)
        if spread > 1:
            self.assertIn(f"Experts over {spread} GPUs receive and return {layers} x {travels / MIB:,.1f} MiB", text)
        return 3 * gathered, 2 * layers * travels

    def test_counts_parameters(self):
        config = Qwen3_5Config(**vision_config(SMALL))
        model = modeling_qwen3_5.Qwen3_5ForConditionalGeneration(config)
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.language_model.layers]
        blocks = sum(p.numel() for p in model.model.visual.blocks.parameters())
        total = model.num_parameters()
        found = Parameters.of(config)
        # Embeddings that are not tied.
        same = found.quantized, found.adapters, 0, model.get_input_embeddings().weight.numel()
        expected = Parameters(total, total - sum(layers) - blocks, max(layers), found.matrices, *same)
        self.assertEqual(replace(found, layers=()), expected)
        linear = [
            sum(x.weight.numel() for x in layer.modules() if isinstance(x, torch.nn.Linear))
            for layer in model.model.language_model.layers
        ]
        self.assertEqual([sum(number for number, _ in each) for each in found.layers], linear)
        text = modeling_qwen3_5.Qwen3_5ForCausalLM(config.text_config)
        matrices = sum(x.numel() for name, x in text.named_parameters() if is_hidden(name))
        self.assertEqual(Parameters.of(config.text_config).matrices, matrices)

    def test_counts_the_bytes_of_27b(self):
        """Weights, gradients and moments of a step on the meta device."""
        config = Qwen3_5TextConfig(**SIZES["27B"])
        parameters, sizes = Parameters.of(config), sizes_of(config)
        self.assertEqual(parameters.total, 26_895_998_464)
        need = step_memory(sizes, parameters, 2**14, 1, 1, 2, checkpointed_layers(config, 1))
        self.assertEqual(round(need.weights / GIB, 1), 50.1)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        self.assertEqual((need.weights, need.gradients, need.moments), bytes_of_a_step(model))

    def test_counts_adapters_as_peft_does(self):
        config = Qwen3_5Config(**vision_config(SMALL))
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            )
        self.assertEqual(4 * Parameters.of(config).adapters, model.get_nb_trainable_parameters()[0])

    @parameterized.expand(
        [
            (f"{family}{', experts' * experts}", family, experts)
            for family, experts in (("qwen3_next", False), ("qwen3_5_moe", True), ("kimi_linear", True))
            if family in SIZED_NAMES
        ]
    )
    def test_counts_the_bytes_of_adapters(self, _, family, experts):
        """Weights, gradients and moments after a step on the CPU."""
        qwen = {"qwen3_next": Qwen3NextConfig, "qwen3_5_moe": Qwen3_5MoeTextConfig}
        config = qwen[family](**SMALL, **EXPERTS) if family in qwen else tiny_config(family)
        with registered():
            model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model = with_adapters(model, Namespace(lora_rank=4, experts=experts)).train()
        row = torch.arange(1, 25)[None]
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=row, labels=row, cu_seqlens=torch.tensor([0, 10, 24])).loss.backward()
        sizes, parameters, lora = sizes_of(config), Parameters.of(config), Lora(4, experts)
        need = step_memory(sizes, parameters, 24, 1, 1, 2, [False] * len(sizes.layers), False, None, lora)
        self.assertEqual((need.weights, need.gradients, need.moments), bytes_of_a_step(model))
        # One adapter of a linear layer saves 4 numbers per token.
        for number, layer in enumerate(sizes.layers):
            names = [n for n, _ in model.named_parameters() if "lora_A" in n and f"layers.{number}." in n]
            linear = sum(".experts." not in name for name in names)
            self.assertEqual(len(names) - linear, 2 * (experts and isinstance(layer.mlp, Experts)))
            kept = [layer_memory(sizes, layer, 24, 1, None, Lora(rank))[0] for rank in (4, 0)]
            self.assertEqual(kept[0] - kept[1], 2 * 24 * 4 * linear)

    @parameterized.expand([("all", 0, False), ("alone", 0, True), ("LoRA", 4, False)])
    def test_counts_the_bytes_of_a_head(self, _, rank, alone):
        """Weights, gradients and moments of a step on the meta device. Beside adapters, a head is in float32."""
        config = Qwen3_5MoeTextConfig(**SMALL, **EXPERTS, mtp_num_hidden_layers=1)
        with torch.device("meta"), registered():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if rank:
            model = with_adapters(model, Namespace(lora_rank=rank, experts=True))
        elif alone:
            model.requires_grad_(False)
        head = add_mtp(model, dtype=torch.float32 if rank else None)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        sizes, parameters = sizes_of(config), Parameters.of(config, mtp=True)
        self.assertEqual(parameters.head, sum(x.numel() for x in head.parameters()))
        lora, chosen = Lora(rank, rank > 0, mtp_only=alone), checkpointed_layers(config, 0, True)
        need = step_memory(sizes, parameters, 24, 1, 1, 2, chosen, False, None, lora)
        self.assertEqual((need.weights, need.gradients, need.moments), bytes_of_a_step(model))

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_counts_the_bytes_of_weights_in_4_bit(self):
        from bitsandbytes.functional import quantize_4bit

        weight = torch.randn(8 * 64, 256, generator=torch.Generator().manual_seed(0))
        codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
        found = codes.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
        self.assertEqual(NF4.bytes * weight.numel(), found)

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_counts_the_weights_in_4_bit(self):
        """Those of a model of the commands."""
        from bitsandbytes.nn import Linear4bit

        config = Qwen3_5MoeTextConfig(**SMALL, **EXPERTS)
        names = "lora", "float8", "cuda_graphs", "gradient_checkpointing"
        settings = Namespace(load_in_4bit=True, attn=None, weights="float32", **dict.fromkeys(names, False))
        model = untrained_model(config, settings, torch.float32, torch.device("cpu"), 64)
        linear = [x for x in model.modules() if isinstance(x, Linear4bit)]
        experts = [x for x in model.parameters() if isinstance(x, ExpertsIn4bit)]
        self.assertEqual(len(experts), 2 * config.num_hidden_layers)
        found = sum(x.in_features * x.out_features for x in linear) + sum(x.numel() for x in experts)
        self.assertEqual(Parameters.of(config).quantized, found)

    def test_the_pages_have_these_figures(self):
        page = "".join((ROOT / "docs" / name / "memory.md").read_text() for name in ("explained", "reference"))
        # With single spaces between the columns.
        lines = {" ".join(line.split()) for line in page.splitlines()}
        config = Qwen3_5TextConfig()
        parameters = Parameters.of(config)
        for gpus in (8, 64, 512):
            need = step_memory(sizes_of(config), parameters, 2**18, 8, gpus, 2, [True] * 32)
            sharded, weights = need.weights + need.gradients + need.moments, 2 * parameters.total * (1 - 1 / gpus)
            row = f"{gpus} {gpus // 8} {sharded / GIB:.1f} {need.total / GIB:.1f} {weights / MIB:,.0f}"
            self.assertIn(row, lines)
            figures = []
            for options in ({}, {"gated_delta_rule": "heads"}, {"attention": "heads"}, {"attention": "gather"}):
                fits = "heads" not in options.values() or gpus == 8
                layer = exchanges(config, 2**20, gpus, **options)[2 if "attention" in options else 1]
                figures.append(f"{layer.bytes / MIB:,.0f}" if fits else "-")
            self.assertIn(f"{gpus} {2**20 // gpus:,} {' '.join(figures)}", lines)
        self.assertIn(
            f"```text\n{plan_sequence_parallel(config, 2**19, 8, 80, weights='float32').summary()}\n```", page
        )
        for name, options in CHOICES.items():
            plans = [plan_sequence_parallel(config, tokens, 1, 1024, **options) for tokens in (2**14, 2**17)]
            figures = [f"{need.total / GIB:.1f}" for plan in plans for need in plan.options[1]]
            self.assertIn(f"{name} {' '.join(figures)}", lines)


class SavedTest(InterpretedKernelsTest):
    def test_counts_what_adapters_of_experts_save(self, rank=33):
        """The kernels save a product per choice for the first adapter, with the rank filled up."""
        number, tokens, size = 8, 10, 64
        mixture = {"hidden_size": size, "moe_intermediate_size": size, "num_experts": number, "num_experts_per_tok": 2}
        sizes = sizes_of(Qwen3_5MoeTextConfig(**SMALL | EXPERTS | mixture))
        expected = [layer_memory(sizes, sizes.layers[0], tokens, 1, None, Lora(rank, x))[0] for x in (False, True)]
        new = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
        index = torch.arange(2 * tokens).view(tokens, 2) % number
        call = new(tokens, size), index, new(tokens, 2), new(number, 2 * size, size), new(number, size, size)
        adapters = {
            "gate_up_adapter": Adapter(new(number, rank, size), new(number, 2 * size, rank)),
            "down_adapter": Adapter(new(number, rank, size), new(number, size, rank)),
        }
        without, kept = (
            sum(x.nbytes for x in saved_in(lambda: experts(*call, **given, impl="triton")) if len(x) == 2 * tokens)  # noqa: B023
            for given in ({}, adapters)
        )
        self.assertEqual(kept - without, expected[1] - expected[0])


class PlanTest(unittest.TestCase):
    def test_the_smallest_that_fits(self):
        plan = plan_sequence_parallel(Qwen3_5TextConfig(**SIZES["4B"]), 2**17, 8, 80)
        self.assertEqual(list(plan.options), [1, 2, 4, 8])
        for column, needed in enumerate(plan.needed):
            fits = [size for size, pair in plan.options.items() if pair[column].total <= 0.9 * 80 * GIB]
            self.assertEqual(needed, min(fits, default=None))
        self.assertEqual(plan.needed, (8, 1, 1))
        self.assertEqual(plan_sequence_parallel(Qwen3_5TextConfig(**SIZES["4B"]), 2**17, 8, 48).needed, (None, 2, 1))

    @parameterized.expand([(16, 0), (80, 16)])
    def test_as_few_checkpointed_layers_as_fit(self, memory, rank):
        config = Qwen3_5TextConfig(**SIZES["4B"])
        plan = plan_sequence_parallel(config, 2**16, 8, memory, lora_rank=rank)
        self.assertIsNone(plan.every_n_layers[0])
        for way, offload in ((1, False), (2, True)):
            size, every = plan.needed[way], plan.every_n_layers[way]
            if size is None:
                self.assertIsNone(every)
                continue
            given = sizes_of(config), plan.parameters, 2**16, size, 8, 2
            chosen = {n: checkpointed_layers(config, n) for n in range(1, 33)}
            totals = {n: step_memory(*given, chosen[n], offload, None, Lora(rank)).total for n in chosen}
            self.assertLessEqual(totals[every], 0.9 * memory * GIB)
            self.assertTrue(all(total > 0.9 * memory * GIB for n, total in totals.items() if n > every))
            self.assertIn(f"P = {size}, every_n_layers={every}", plan.summary())

    def test_checkpointed_layers_are_those_of_the_model(self):
        config = Qwen3_5Config(**vision_config(SMALL))
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
            head = model.mtp = MtpHead(model)
        for every in (1, 2, 3, 5):
            model.gradient_checkpointing_enable(**{"every_n_layers": every} if can_select_checkpoints() else {})
            found = [layer.gradient_checkpointing for layer in (*model.get_decoder().layers, *head.layers)]
            if every == 1 or can_select_checkpoints():
                self.assertEqual(checkpointed_layers(config, every, head=True), found, every)
                self.assertEqual(checkpointed_layers(config, every), found[:-1], every)

    def test_attention_that_is_kept(self):
        """Outputs in bfloat16, and a sum per token and head. The backward of a layer has its own in any case.

        In host memory, those of long documents are kept in any case.
        """
        config = Qwen3_5TextConfig(**SIZES["4B"])
        usual, kept = (
            plan_sequence_parallel(config, 2**15, 1, 80, lora_rank=16, mtp=True, keep_attention=x) for x in (0, 1)
        )
        output = 2**15 * (2 * 4096 + 4 * 16)
        self.assertEqual(usual.options[1][0], kept.options[1][0])
        self.assertEqual(usual.options[1][2], kept.options[1][2])
        less, more = usual.options[1][1], kept.options[1][1]
        # The head is the ninth layer with attention.
        self.assertEqual(more.saved - less.saved, 9 * output)
        self.assertAlmostEqual((more.total - less.total) / output, 9, delta=1)
        self.assertEqual(kept.options[1][2].host - 33 * 2**15 * 2 * 2560, 9 * output)
        # Trained alone, the head is the only layer with a checkpoint.
        alone = plan_sequence_parallel(config, 2**15, 1, 80, mtp_only=True, weights="bfloat16").options[1][2]
        self.assertEqual(alone.host, 2**15 * 2 * 2560 + output)
        short, long = (plan_sequence_parallel(config, n, 1, 80, lora_rank=16) for n in (2**14 - 1, 2**14))
        self.assertLess(1.4 * short.options[1][2].host, long.options[1][2].host)
        self.assertIn("every_n_layers=2, keep_attention=True", kept.summary())
        self.assertNotIn("keep_attention", usual.summary())

    def test_segments(self):
        """Named if the row of one GPU does not fit, and the longest that do."""
        config, given = Qwen3_5TextConfig(**SIZES["4B"]), {"lora_rank": 16}
        plan = plan_sequence_parallel(config, 2**18, 8, 40, **given)
        self.assertEqual((plan.needed[2], plan.segments[:2]), (2, (None, None)))
        tokens = plan.segments[2]
        self.assertIn(f"GiB of host memory per GPU; P = 1 with segment_tokens={tokens}", plan.summary())
        totals = [
            plan_sequence_parallel(config, 2**18, 8, 500, **given, segment_tokens=n).options[1][2].total
            for n in (tokens, 2 * tokens)
        ]
        self.assertLessEqual(totals[0], 0.9 * 40 * GIB)
        self.assertGreater(totals[1], 0.9 * 40 * GIB)
        # Parts of a row are not cut.
        plan = plan_sequence_parallel(config, 2**18, 8, 40, **given, segment_tokens=tokens)
        self.assertEqual((list(plan.options), plan.needed, plan.segments), ([1], (None, None, 1), (None,) * 3))
        self.assertIn(f"rows of 262,144 tokens in segments of {tokens:,}, 8 GPUs", plan.summary())
        self.assertIn(f"every_n_layers=1, segment_tokens={tokens}, ", plan.summary())
        message = "got 36. Pass segment_tokens=65536 and offload, use more GPUs or shorter rows."
        with self.assertRaisesRegex(ValueError, message):
            plan_sequence_parallel(config, 2**18, 1, 36, **given)

    def test_segments_of_checkpointed_layers(self):
        """Layers save what crosses the cuts, and their backward needs the activations of a segment."""
        config = Qwen3_5TextConfig(**SIZES["4B"])
        sizes, tokens, segment = sizes_of(config), 2**16, 2**14
        given = sizes, Parameters.of(config), tokens, 1, 1, 2
        attention, rule = sizes.attention, sizes.delta_rule
        across = 8 * 3 * segment * 2 * attention.kv_heads * 2 * attention.dim
        across += 24 * 3 * (4 * rule.state + 2 * 3 * (2 * rule.keys + rule.values))

        def need(cut, checkpointed=(True,) * 32, offload=False, **options):
            lora, optimizer = Lora(16), OPTIMIZERS[DEFAULT]
            return step_memory(*given, checkpointed, offload, None, lora, optimizer, segment_tokens=cut, **options)

        whole, cut, longer = (need(n) for n in (None, segment, tokens))
        self.assertEqual(longer, whole)
        self.assertEqual(cut.saved - whole.saved, across)
        self.assertLess(cut.working, 0.4 * whole.working)
        # Layers without checkpointing are not cut.
        self.assertEqual(need(segment, (False,) * 32), need(None, (False,) * 32))
        # The inputs of all segments together are those of the row. The host has them, and the GPU one at a time.
        in_host, of_segments = need(None, offload=True), need(segment, offload=True)
        self.assertEqual(of_segments.host, in_host.host)
        # In the backward of the last layer: its input, the embeddings, and an input of a segment on its way.
        checkpoint = 2 * config.hidden_size
        self.assertEqual(cut.total - of_segments.total, (30 * tokens - segment) * checkpoint)
        # Attention that is kept is that of the whole row.
        kept = need(segment, keep_attention=True)
        self.assertAlmostEqual(kept.total - cut.total, kept.saved - cut.saved, delta=1)
        self.assertEqual(kept.saved - cut.saved, need(None, keep_attention=True).saved - whole.saved)

    def test_segments_of_a_head(self):
        config = Qwen3_5TextConfig(**SIZES["4B"])
        for options in ({"mtp": True}, {"mtp_only": True}):
            whole, cut = (
                plan_sequence_parallel(config, 2**16, 1, 500, **options, segment_tokens=n).options[1][1]
                for n in (None, 2**13)
            )
            self.assertLess(cut.total, whole.total - 2**30)

    def test_a_head(self):
        """Alone, it saves nothing of other layers. Beside them, the product of both losses has twice as many tokens."""
        config = Qwen3_5TextConfig(**SIZES["4B"])
        plans = [plan_sequence_parallel(config, 2**14, 1, 200, **x) for x in ({}, {"mtp": True}, {"mtp_only": True})]
        without, both, alone = (plan.options[1][0] for plan in plans)
        self.assertEqual(both.weights, alone.weights)
        self.assertEqual(alone.gradients, both.gradients - without.gradients)
        given = 2 * 2**14 * config.hidden_size
        self.assertEqual(both.saved - without.saved, alone.saved - given)
        self.assertGreater(both.total - without.total, both.weights - without.weights + alone.saved)
        self.assertIn("4.21 B parameters and 121 M in a head of multi-token prediction, rows", plans[1].summary())
        self.assertIn("121 M in a head of multi-token prediction, trained alone, rows", plans[2].summary())

    @parameterized.expand(
        [("rows", {"gradient_accumulation_steps": 2}), ("DDP", {"lora_rank": 16, "load_in_4bit": True})]
    )
    def test_gradients_throughout_a_step(self, _, options):
        """With several rows, or in the buckets of DDP, all gradients exist beside all activations."""
        config, usual = Qwen3_5TextConfig(**SIZES["4B"]), {**options, "gradient_accumulation_steps": 1}
        gpus = 1 if "lora_rank" not in options else 2
        once = plan_sequence_parallel(config, 2**13, 1, 500, **usual).options[1]
        throughout = plan_sequence_parallel(config, 2**13, gpus, 500, **options).options[1]
        for less, more in zip(once, throughout, strict=True):
            self.assertEqual(less.gradients, more.gradients)
            self.assertGreater(more.total, less.total)
            self.assertLessEqual(more.total - less.total, more.gradients)

    def test_offload(self):
        """Two checkpoints are on the GPU, at the loss one. Layers without a checkpoint keep their activations there."""
        output = 2**15 * (2 * 4096 + 4 * 16)
        config = Qwen3_5TextConfig(**SIZES["4B"])
        given = sizes_of(config), Parameters.of(config), 2**15, 1, 1, 2
        checkpoint = 2 * 2**15 * config.hidden_size
        for every, checkpoints in ((1, 32), (2, 16), (16, 2), (32, 1)):
            chosen = checkpointed_layers(config, every)
            options = None, ALL_TRAINED, OPTIMIZERS[DEFAULT]
            with_it, without = (step_memory(*given, chosen, offload, *options, 2) for offload in (True, False))
            self.assertEqual(without.saved - with_it.saved, (checkpoints - 1) * checkpoint)
            kept = 8 * output if every == 1 else 0
            self.assertEqual((with_it.host, without.host), (checkpoints * checkpoint + kept, 0))
            # The peak is at the loss, or in a layer: the one before the last takes more than it, and has a checkpoint less below.
            spared = (without.total - with_it.total) / checkpoint
            self.assertIn(spared, {max(checkpoints - fewer, 0) for fewer in (1, 2, 3)})
            # In a step of one row, the gradients of the first layers come after their activations.
            self.assertLess(step_memory(*given, chosen, True).total, with_it.total)

    def test_weights_and_length_and_methods(self):
        config = Qwen3_5TextConfig(**SIZES["4B"])
        half, full = (plan_sequence_parallel(config, 2**14, 4, 80, weights=w) for w in ("bfloat16", "float32"))
        for size in (1, 2, 4):
            self.assertEqual(2 * half.options[size][0].moments, full.options[size][0].moments)
            self.assertEqual(half.options[size][0].saved, full.options[size][0].saved)
        # One GPU has no FSDP2, which would cast the weights: hidden states between layers are in float32.
        half, full = (plan_sequence_parallel(config, 2**14, 1, 80, weights=w) for w in ("bfloat16", "float32"))
        given = 2**14 * config.hidden_size
        # Two in each layer, one as its checkpoint, or that of the last layer with offload.
        number = config.num_hidden_layers
        for less, more, times in zip(half.options[1], full.options[1], (2 * number, number, 1), strict=True):
            self.assertEqual(more.saved - less.saved, 2 * times * given)
        # A P is no option if a rank has less than a window, or if it does not divide the heads.
        self.assertEqual(list(plan_sequence_parallel(config, 11, 8, 80).options), [1, 2])
        odd = Qwen3_5TextConfig(**{**SIZES["4B"], "num_attention_heads": 12})
        self.assertEqual(list(plan_sequence_parallel(odd, 2**14, 16, 80).options), [1, 2, 4, 8, 16])
        self.assertEqual(list(plan_sequence_parallel(odd, 2**14, 16, 80, attention="heads").options), [1, 2, 4])

    def test_lora(self):
        config = Qwen3_5TextConfig(**SIZES["4B"])
        whole, half, lora = (
            plan_sequence_parallel(config, 2**14, 2, 80, **options)
            for options in ({}, {"lora_rank": 8}, {"lora_rank": 16})
        )
        for (need, *_), (less, *_), (more, *_) in zip(*(x.options.values() for x in (whole, half, lora)), strict=True):
            adapters = 4 * 8 * whole.parameters.adapters / 2
            self.assertEqual(
                (less.weights, less.gradients, less.moments), (need.weights + adapters, adapters, 2 * adapters)
            )
            self.assertEqual(more.gradients, 2 * less.gradients)
            self.assertLess(less.gathered, need.gathered)
            # The outputs of both norms, beside the products of the adapters.
            tokens = need.saved - less.saved + (more.saved - less.saved)
            self.assertEqual(tokens % (2 * 2 * config.hidden_size * config.num_hidden_layers), 0)
        self.assertRegex(
            lora.summary(), r"4.21 B parameters and 32 M in adapters, rows .*\n.*gradients 0.1 GiB, AdamW 0.1"
        )
        # Short inputs of layers stay.
        given = sizes_of(config), whole.parameters, 2**10, 1, 1, 2, [False] * 32, False, None
        short = [step_memory(*given, Lora(rank)).saved for rank in (0, 16)]
        self.assertGreater(short[1], short[0])

    @parameterized.expand(
        [
            (
                "too little memory",
                {"memory": 4},
                r"expected at least [\d.]+ GiB per GPU for .* 4.21 B parameters .* got 4\.",
            ),
            ("no row", {"max_length": 0}, "max_length above 0"),
            ("weights", {"weights": "int8"}, "weights"),
            ("segments", {"segment_tokens": 63}, "segment_tokens of at least 64, got 63"),
            ("rank", {"lora_rank": -1}, "lora_rank of at least 0"),
            ("no experts", {"expert_parallel": 2}, "a mixture of experts, with expert_parallel, got qwen3_5_text"),
            ("method", {"attention": "ring"}, "expected attention of .*gather.*, got 'ring'"),
            (
                "heads",
                {"memory": 12, "max_length": 2**20, "gpus": 64, "attention": "heads"},
                "larger P does not fit the heads",
            ),
            (
                "experts",
                {"lora_rank": 16, "lora_experts": True},
                "a mixture of experts, with lora_experts, got qwen3_5_t",
            ),
            ("experts alone", {"lora_experts": True}, "lora_rank with lora_experts, got 0"),
            (
                "experts in host memory",
                {"lora_rank": 16, "experts_in_host_memory": True, "layers_in_host_memory": True},
                "a mixture of experts, with experts_in_host_memory, got qwen3_5_text. Leave it out",
            ),
            (
                "trained experts in host memory",
                SPREAD | {"expert_parallel": 1, "experts_in_host_memory": True},
                "lora_rank with experts_in_host_memory, got 0. Trained experts stay on the GPU",
            ),
            (
                "spread experts in host memory",
                SPREAD | {"lora_rank": 8, "experts_in_host_memory": True},
                "got 2 with experts_in_host_memory. Leave",
            ),
            (
                "layers of OLMo in host memory",
                {"config": tiny_config("olmo_hybrid"), "lora_rank": 8, "layers_in_host_memory": True},
                "a family whose layers can be in host memory, with layers_in_host_memory, got olmo_hybrid",
            ),
            (
                "trained layers in host memory",
                {"layers_in_host_memory": True},
                "lora_rank with layers_in_host_memory, got 0. Trained layers stay on the GPU",
            ),
            ("AdamW", {"optimizer": "adam"}, "expected an optimizer of adamw_torch_fused"),
            (
                "Muon",
                {"lora_rank": 16, "optimizer": "muon"},
                "all weights trained with muon, got LoRA adapters. Choose",
            ),
            (
                "corrections",
                {"lora_rank": 16, "optimizer": "flash_adamw"},
                "trained weights in bfloat16 with flash_adamw, got float32. LoRA",
            ),
            ("kind", {"config": LlamaConfig()}, "got llama"),
            ("FP8", {"config": in_fp8(Qwen3_5TextConfig())}, "lora_rank with a checkpoint in FP8, got 0. Its weights"),
            (
                "both",
                {"config": in_fp8(Qwen3_5TextConfig()), "lora_rank": 8, "load_in_4bit": True},
                "got one in FP8. Leave",
            ),
            (
                "AWQ",
                {"config": quantized(Qwen3_5TextConfig(), "awq", bits=4, version="gemv"), "lora_rank": 8},
                "weights in 16 or 32 bit, or by bitsandbytes, fp8, .*, in 4 or 8 bit, got awq bits=4 version=gemv. Pass the checkpoint"
                if joins_stored_experts()
                else "transformers >= 5.21 for a checkpoint by awq, got",
            ),
            (
                "spread in FP8",
                SPREAD | {"config": in_fp8(SPREAD["config"]), "lora_rank": 8},
                "got 2 with weights in FP8. Leave",
            ),
            ("spread", SPREAD | {"expert_parallel": 3}, "that divides 8 GPUs and 256 experts, got 3"),
            ("not at all", SPREAD | {"expert_parallel": 0}, "that divides 8 GPUs and 256 experts, got 0"),
            ("in 4 bit", SPREAD | {"lora_rank": 8, "load_in_4bit": True}, "got 2 with load_in_4bit. Leave"),
            ("adapters", SPREAD | {"lora_rank": 8, "lora_experts": True}, "got 2 with lora_experts. Leave"),
            ("head", SPREAD | {"mtp": True}, "got 2 with a head of multi-token prediction. Leave"),
            ("adapters alone", {"lora_rank": 8, "mtp_only": True}, "lora_rank=0 with mtp_only, got 8. Adapters would"),
            (
                "two",
                {"config": Qwen3_5TextConfig(mtp_num_hidden_layers=2), "mtp": True},
                "mtp_num_hidden_layers=1, .*, got 2",
            ),
            ("8 bit", SPREAD | {"optimizer": "adamw_torch_8bit"}, "got 2 with optimizer=adamw_torch_8bit. Leave"),
        ]
    )
    def test_refuses(self, _, changes, message):
        options = {"config": Qwen3_5TextConfig(**SIZES["4B"]), "max_length": 2**17, "gpus": 8, "memory": 80}
        with self.assertRaisesRegex(ValueError, message):
            plan_sequence_parallel(**options | changes)

    @parameterized.expand([("bfloat16", False), ("float32", False), ("bfloat16", True)])
    def test_experts_in_host_memory(self, weights, in_4bit):
        """The GPU has all weights but those of experts, and the experts of two layers."""
        config = Qwen3_5MoeTextConfig(num_hidden_layers=4)
        options = {"weights": weights, "lora_rank": 8, "lora_experts": True, "load_in_4bit": in_4bit}
        plans = [
            plan_sequence_parallel(config, 2**14, 1, 80, **options, experts_in_host_memory=on_host)
            for on_host in (False, True)
        ]
        usual, need = (plan.options[1][0] for plan in plans)
        layer = 256 * 3 * 512 * 2048 * (NF4.bytes if in_4bit else 2 if weights == "bfloat16" else 4)
        self.assertAlmostEqual(need.weights_on_host, 4 * layer, delta=1)
        self.assertAlmostEqual(usual.weights - need.weights, 2 * layer, delta=1)
        self.assertEqual((usual.moments, usual.most, usual.weights_on_host), (need.moments, need.most, 0))
        host, two = f"{need.weights_on_host / GIB:,.1f}", f"{2 * layer / GIB:,.1f}"
        said = f"\nExperts: {host} GiB of host memory for each machine, of which each GPU has {two} GiB at a time\n"
        self.assertIn(said, plans[1].summary())
        self.assertIn("Not sharded, on each GPU", plans[1].summary())
        self.assertNotIn("host memory for each machine", plans[0].summary())
        # The processes of a machine share them.
        several = plan_sequence_parallel(config, 2**14, 8, 80, **options, experts_in_host_memory=True)
        self.assertEqual(several.options[1][0].weights_on_host, need.weights_on_host)
        self.assertIn(said, several.summary())

    @parameterized.expand([("dense", False), ("dense", True), ("mixture", True)])
    def test_layers_in_host_memory_of_a_model(self, kind, in_4bit):
        """The plan counts what stays on the host, and the GPU has that of two layers."""
        if in_4bit and not find_spec("bitsandbytes"):
            self.skipTest("needs bitsandbytes")
        sizes = SMALL | {"hidden_size": 256, "intermediate_size": 512}
        config = Qwen3_5TextConfig(**sizes)
        if kind == "mixture":
            config = Qwen3_5MoeTextConfig(**sizes, **EXPERTS | {"moe_intermediate_size": 256})
        options = {"lora_rank": 1, "load_in_4bit": in_4bit}
        # In a small model, gates are below.
        smallest = (mock.patch.object(module, "SMALLEST", 1 << 12) for module in (host_parameters, memory_of_models))
        with next(smallest), next(smallest):
            with registered(), torch.device("meta" if in_4bit else "cpu"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            if in_4bit:
                initialize_in_4bit(model, nf4(torch.bfloat16), torch.device("cpu"))
            keep_layers_in_host_memory(model.requires_grad_(False))
            plans = [
                plan_sequence_parallel(config, 2**8, 1, 80, **options, layers_in_host_memory=on_host)
                for on_host in (False, True)
            ]
        usual, need = (plan.options[1][0] for plan in plans)
        found, expected = bytes_in_host_memory(model), need.weights_on_host
        # Tables of NF4, and gaps between its tensors.
        self.assertLess(abs(found / expected - 1), 0.1 if in_4bit else 0.001)
        self.assertRegex(
            plans[1].summary(),
            r"\nLayers: 0.0 GiB of host memory for each machine, of which each GPU has 0.0 GiB at a",
        )
        self.assertEqual((usual.moments, usual.most, usual.weights_on_host), (need.moments, need.most, 0))
        layers = len(SMALL["layer_types"])
        self.assertAlmostEqual((usual.weights - need.weights) / (expected * (1 - 2 / layers)), 1, delta=0.1)

    @parameterized.expand([(None,), ("nf4",)])
    def test_experts_in_host_memory_of_a_model(self, kind):
        if kind and not find_spec("bitsandbytes"):
            self.skipTest("needs bitsandbytes")
        # Scales of scales are for 256 blocks of 64 weights.
        config = Qwen3_5MoeTextConfig(**SMALL | {"hidden_size": 256}, **EXPERTS | {"moe_intermediate_size": 256})
        with registered():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
        for module in model.modules():
            for name in ("gate_up_proj", "down_proj") if hasattr(module, "gate_up_proj") and kind else ():
                if name in module._parameters:
                    set_weights(module, name, ExpertsIn4bit.of(getattr(module, name).data, kind, True))
        keep_experts_in_host_memory(model)
        plan = plan_sequence_parallel(
            config, 2**8, 1, 80, lora_rank=1, load_in_4bit=bool(kind), experts_in_host_memory=True
        )
        found, expected = bytes_in_host_memory(model), plan.options[1][0].weights_on_host
        # The tables of NF4, and the gaps between tensors.
        self.assertLess(abs(found - expected), 2 * len(SMALL["layer_types"]) * 2 * 6 * 512 if kind else 1)
        self.assertLess(abs(found / expected - 1), 0.03)

    def test_weights_in_4_bit(self):
        config = Qwen3_5MoeTextConfig(num_hidden_layers=4)
        whole, need = (
            plan_sequence_parallel(config, 2**14, 2, 80, lora_rank=8, lora_experts=True, load_in_4bit=in_4bit)
            for in_4bit in (False, True)
        )
        # They are not sharded, and so nothing else is.
        first, second = whole.options[1][0], need.options[1][0]
        self.assertAlmostEqual(
            (2 * first.weights - second.weights) / whole.parameters.quantized, 2 - 0.51586914, places=6
        )
        self.assertEqual((second.gradients, second.moments), (2 * first.gradients, 2 * first.moments))
        self.assertEqual(second.gathered, 0)
        self.assertRegex(
            need.summary(), r"(?s)\nNot sharded, on each GPU: weights .*\nDDP transfers per GPU: [\d,.]+ MiB of"
        )
        self.assertNotIn("FSDP2", need.summary())
        # The backward of experts has a piece of a weight in bfloat16, or a weight of a small model.
        for sizes, most in ((config, 2**28), (Qwen3_5MoeTextConfig(**SMALL, **EXPERTS), 8 * 2 * 16 * 32)):
            layer = sizes_of(sizes).layers[0]
            made = [
                layer_memory(sizes_of(sizes), layer, 2, 1, None, Lora(8, True, stored))[1] for stored in ("nf4", None)
            ]
            self.assertEqual(made[0] - made[1], 2 * most)

    def test_checkpoint_in_fp8(self):
        config = Qwen3_5MoeTextConfig(num_hidden_layers=4)
        options = {"max_length": 2**14, "gpus": 2, "memory": 80, "lora_rank": 8, "lora_experts": True}
        in_4bit, need = (
            plan_sequence_parallel(x, **options, load_in_4bit=x is config) for x in (config, in_fp8(config))
        )
        # All linear layers but small ones, routers and the head, as in 4 bit.
        self.assertEqual(need.parameters, in_4bit.parameters)
        more = (stored_as(in_fp8(config)).bytes - NF4.bytes) * need.parameters.quantized
        self.assertAlmostEqual(need.options[1][0].weights, in_4bit.options[1][0].weights + more, delta=1)
        self.assertRegex(need.summary(), r" B parameters \([\d.]+ B in FP8\) and (?s:.*)\nNot sharded")
        kept = in_fp8(config)
        kept.quantization_config["modules_to_not_convert"] += ["shared_expert.up_proj"]
        parameters = plan_sequence_parallel(kept, **options).parameters
        self.assertEqual(
            need.parameters.quantized - parameters.quantized,
            4 * config.hidden_size * config.shared_expert_intermediate_size,
        )

    @parameterized.expand(
        [(name, "bfloat16") for name in OPTIMIZERS] + [(DEFAULT, "float32"), ("flash_adamw", "float32")]
    )
    def test_optimizers(self, name, weights):
        """States and gradients are those of the table, and nothing is sharded that FSDP2 cannot shard."""
        config, optimizer = Qwen3_5TextConfig(**SIZES["4B"]), OPTIMIZERS[name]
        given = config, 2**14, 4, 141
        if optimizer.correction and weights == "float32":
            with self.assertRaisesRegex(ValueError, f"trained weights in bfloat16 with {name}, got float32"):
                plan_sequence_parallel(*given, weights=weights, optimizer=name)
            return
        width, gpus = {"float32": 4, "bfloat16": 2}[weights], 4 if optimizer.shards else 1
        plan = plan_sequence_parallel(*given, weights=weights, optimizer=name)
        usual = plan_sequence_parallel(config, 2**14, gpus, 141, weights=weights)
        number, head = plan.parameters.total, config.vocab_size * config.hidden_size
        for need, other in zip(plan.options[1], usual.options[1], strict=True):
            self.assertEqual(need.weights, width * number / gpus)
            states = optimizer.states(width, number, head, plan.parameters.matrices)
            self.assertEqual(need.moments, states / gpus)
            released = width * (plan.parameters.layer + head) / gpus
            self.assertEqual(need.gradients, released if optimizer.releases else need.weights)
            self.assertEqual((need.saved, need.working), (other.saved, other.working))
        text = plan.summary()
        self.assertIn(f"{'AdamW' if name == DEFAULT else name} {plan.options[1][0].moments / GIB:,.1f} GiB", text)
        self.assertEqual("FSDP2 shards" in text, optimizer.shards)
        self.assertEqual("DDP transfers" in text, not optimizer.shards)

    def test_optimizers_of_adapters(self):
        config = Qwen3_5TextConfig(**SIZES["4B"])
        plan = plan_sequence_parallel(config, 2**14, 1, 80, lora_rank=16, optimizer="adamw_8bit")
        trained = plan.parameters.trained(plan.lora)
        self.assertEqual(plan.options[1][0].moments, OPTIMIZERS["adamw_8bit"].states(4, trained))
