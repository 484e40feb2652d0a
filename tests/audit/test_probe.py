"""The audit finds every planted fault and names its module, and finds none in correct models."""

import random
import sys
import unittest
from functools import partial
from unittest import mock

import accelerate
import pytest
import torch
from mixins.vision import EXPERTS, IMAGE, TEXT, TINY, VIDEO, VISION_START, vision_config
from parameterized import parameterized
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    set_seed,
)
from transformers import Qwen3_5ForCausalLM as BuiltinQwen3_5ForCausalLM

from transformers_packed import AuditReport, SequenceBoundaries, audit_model
from transformers_packed.audit.probe import Probe
from transformers_packed.models.qwen3_5 import modeling_qwen3_5
from transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
from transformers_packed.models.qwen3_next import modeling_qwen3_next
from transformers_packed.ops import prompts


# With 0.02, the layers of a tiny model hardly affect its logits.
SETTINGS = {**TINY, "initializer_range": 0.15, "num_hidden_layers": 4}
SETTINGS["layer_types"] = ["linear_attention", "full_attention"] * 2
LLAMA = {
    name: SETTINGS[name]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "initializer_range")
}
LLAMA["num_hidden_layers"] = 2
# Shorter than the default, which the first correct model has.
LENGTHS = [17, 1, 40, 3, 15]


audit = partial(audit_model, lengths=LENGTHS)


def qwen3_5(dtype=torch.float32, cls=modeling_qwen3_5.Qwen3_5ForCausalLM, **kwargs):
    set_seed(0)
    return cls._from_config(Qwen3_5TextConfig(**SETTINGS), dtype=dtype, **kwargs)


def qwen3_next(dtype=torch.float32, **config):
    set_seed(0)
    config = Qwen3NextConfig(**{**SETTINGS, "mlp_only_layers": [0, 1, 2, 3], **config})
    return modeling_qwen3_next.Qwen3NextForCausalLM._from_config(config, dtype=dtype)


def qwen3_5_moe(dtype=torch.float32):
    set_seed(0)
    return Qwen3_5MoeForCausalLM._from_config(Qwen3_5MoeTextConfig(**SETTINGS, **EXPERTS), dtype=dtype)


def llama(dtype=torch.float32, attn="sdpa", **config):
    set_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**{**LLAMA, **config}), dtype=dtype, attn_implementation=attn)


def gpt2(dtype=torch.float32):
    set_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=2048, initializer_range=0.15)
    return GPT2LMHeadModel._from_config(config, dtype=dtype)


def plant_in_op(module: torch.nn.Module, *ops: str, replace) -> None:
    """While `module` runs, pass its ops `replace(boundaries)` instead of the right boundaries."""
    namespace = vars(sys.modules[type(module).__module__])
    forward = module.forward

    def faulty(op):
        return lambda *args, boundaries=None, **kwargs: op(*args, boundaries=replace(boundaries), **kwargs)

    def planted(*args, **kwargs):
        before = {name: namespace[name] for name in ops}
        try:
            namespace.update({name: faulty(op) for name, op in before.items()})
            return forward(*args, **kwargs)
        finally:
            namespace.update(before)

    module.forward = planted


def plant_in_output(module: torch.nn.Module, change) -> None:
    """Replace the output of `module` by `change(output)`, but keep attention weights."""
    forward = module.forward

    def planted(*args, **kwargs):
        output = forward(*args, **kwargs)
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.forward = planted


def when_packed(model: torch.nn.Module, change):
    """Apply `change` for a module of `model`, but only while `model` runs with `seq_idx`."""
    packed = []
    model.register_forward_pre_hook(lambda _, args, kwargs: packed.append("seq_idx" in kwargs), with_kwargs=True)
    return lambda x: change(x) if packed[-1] else x


def audit_ids(model: torch.nn.Module) -> torch.Tensor:
    """Return the row of tokens that an audit of `model` starts from."""
    return Probe(model, LENGTHS, [-1] * len(LENGTHS), 4, None, False, 0, []).ids


def no_boundaries(boundaries):
    return None


def shifted(by: int):
    """Shift every inner boundary by `by` tokens."""

    def replace(boundaries):
        if boundaries is None or boundaries.num_documents != len(LENGTHS):
            return boundaries
        lengths = list(boundaries.lengths)
        lengths[0], lengths[-1] = lengths[0] + by, lengths[-1] - by
        return SequenceBoundaries.from_lengths(lengths)

    return replace


class EarlierTokensGetGradients(torch.autograd.Function):
    """The identity, with a backward in which every token receives gradients from all later tokens."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-2 * (gradient.sum(1, keepdim=True) - gradient.cumsum(1))


class PlantedFaultsTest(unittest.TestCase):
    def assertFinds(self, model, module, kind, direction="forward", source="all", pairs=None, lengths=LENGTHS):
        report = audit(model, lengths=lengths, inputs=(source,), gradients=direction == "backward")
        self.assertFalse(report.ok)
        self.assertEqual(report.sources[source].verdict, "leaks")
        found = [leak for leak in report.leaks if leak.module is not None and leak.direction == direction]
        self.assertEqual([(leak.module, leak.kind) for leak in found], [(module, kind)], report.table())
        self.assertEqual(found[0].module_class, type(model.get_submodule(module)).__name__)
        self.assertIn(module, report.table())
        if pairs is not None:
            got = {(leak.from_document, leak.to_document) for leak in report.leaks if leak.direction == direction}
            self.assertEqual(got, pairs)
        return report

    def test_convolution_not_reset(self):
        model = qwen3_5()
        plant_in_op(model.model.layers[2].linear_attn, "causal_conv1d_qkv", replace=no_boundaries)
        self.assertFinds(model, "model.layers.2.linear_attn", "convolution")

    def test_state_not_reset(self):
        model = qwen3_next(torch.bfloat16)
        plant_in_op(model.model.layers[0].linear_attn, "gated_delta_rule", replace=no_boundaries)
        self.assertFinds(model, "model.layers.0.linear_attn", "state", source="position_ids")

    def test_attention_across_documents(self):
        model = qwen3_5(torch.bfloat16)
        plant_in_op(model.model.layers[1].self_attn, "attention", replace=no_boundaries)
        every_earlier = {(i, j) for j in range(len(LENGTHS)) for i in range(j)}
        self.assertFinds(model, "model.layers.1.self_attn", "attention", pairs=every_earlier)

    @parameterized.expand([("late", 1), ("early", -1)])
    def test_boundary_off_by_one(self, _, by):
        model = qwen3_5()
        plant_in_op(model.model.layers[0].linear_attn, "causal_conv1d_qkv", "gated_delta_rule", replace=shifted(by))
        # Of a short document before another one, the state is all that reaches it.
        self.assertFinds(model, "model.layers.0.linear_attn", "boundary", lengths=[65, 9, 70, 33, 64])

    def test_boundary_off_by_one_in_attention(self):
        model = qwen3_5()
        plant_in_op(model.model.layers[3].self_attn, "attention", replace=shifted(1))
        report = self.assertFinds(model, "model.layers.3.self_attn", "attention")
        # The first token of each document goes to the previous one. Document 1 has only one token, so document 2 loses
        # its own.
        got = {(leak.from_document, leak.to_document): leak.kind for leak in report.leaks}
        self.assertEqual(set(got), {(0, 1), (None, 2), (2, 3), (3, 4)})
        self.assertEqual(got[None, 2], "boundary")

    def test_positions_that_do_not_restart(self):
        model = gpt2()
        wpe = model.transformer.wpe
        forward = wpe.forward
        wpe.forward = lambda ids: forward(torch.arange(ids.shape[-1])[None])
        report = self.assertFinds(model, "transformer.wpe", "positions", direction="alone")
        self.assertEqual({leak.direction for leak in report.leaks}, {"alone"})
        # The first document has the same positions as alone.
        self.assertEqual({leak.to_document for leak in report.leaks}, set(range(1, 5)))

    def test_rotary_positions_that_do_not_restart(self):
        """Rotations encode distances only, so this matters only if they scale with the length of the row."""

        def plant(model):
            rotary = model.model.rotary_emb
            forward = rotary.forward
            rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1]).expand_as(position_ids))
            return model

        self.assertTrue(audit(plant(qwen3_next()), inputs=("all",), gradients=False).ok)
        dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 1.0}
        model = plant(qwen3_next(rope_parameters=dynamic, max_position_embeddings=220))
        report = audit(model, lengths=[65, 1, 200], inputs=("all",), gradients=False)
        self.assertEqual({leak.direction for leak in report.leaks}, {"alone"}, report.table())
        self.assertEqual(
            [(leak.module, leak.kind) for leak in report.leaks if leak.module], [("model.rotary_emb", "positions")]
        )

    def test_only_in_backward(self):
        model = qwen3_5()
        plant_in_output(model.model.layers[2].mlp, EarlierTokensGetGradients.apply)
        report = self.assertFinds(model, "model.layers.2.mlp", "backward only", direction="backward")
        self.assertEqual({leak.direction for leak in report.leaks}, {"backward"})
        self.assertTrue(audit(model, gradients=False).ok)

    def test_only_past_64_tokens(self):
        model = qwen3_5()
        layer = model.model.layers[2].linear_attn
        namespace, forward = vars(modeling_qwen3_5), layer.forward
        rule = namespace["gated_delta_rule"]

        def faulty(*args, boundaries=None, **kwargs):
            right, state = rule(*args, boundaries=boundaries, **kwargs)
            if boundaries is None:
                return right, state
            wrong, _ = rule(*args, boundaries=None, **kwargs)
            late = boundaries.position_ids[0] >= 64
            return torch.where(late[None, :, None, None], wrong, right), state

        def planted(*args, **kwargs):
            try:
                namespace["gated_delta_rule"] = faulty
                return forward(*args, **kwargs)
            finally:
                namespace["gated_delta_rule"] = rule

        layer.forward = planted
        # Slow decay, so that the state persists over 64 tokens.
        with torch.no_grad():
            layer.A_log.fill_(-6.0)
        report = audit(model, inputs=("all",), lengths=[65, 1, 70, 3], gradients=False)
        self.assertEqual({leak.to_document for leak in report.leaks}, {2}, report.table())
        found = [(leak.module, leak.kind) for leak in report.leaks if leak.module and leak.direction == "forward"]
        self.assertEqual(found, [("model.layers.2.linear_attn", "state")])
        self.assertTrue(audit(model, inputs=("all",), lengths=[65, 1, 64, 63], gradients=False).ok)

    @parameterized.expand([("self_attn", "attention"), ("mlp", "other")])
    def test_only_from_document_3_to_2(self, name, kind):
        def change(x):
            documents = list(x.split(LENGTHS, dim=1))
            documents[2] = documents[2] + 0.1 * documents[3].mean(1, keepdim=True)
            return torch.cat(documents, dim=1)

        model = qwen3_5()
        plant_in_output(getattr(model.model.layers[3], name), when_packed(model, change))
        report = audit(model, inputs=("all",), gradients=False)
        found = [leak for leak in report.leaks if leak.direction == "forward"]
        self.assertEqual([(leak.from_document, leak.to_document) for leak in found], [(3, 2)], report.table())
        self.assertEqual((found[0].module, found[0].kind), (f"model.layers.3.{name}", kind))

    def test_a_module_that_cannot_run_by_itself(self):
        """The audit still reports the leak and its module."""
        model = qwen3_5()
        layer = model.model.layers[0].linear_attn
        plant_in_op(layer, "gated_delta_rule", replace=no_boundaries)
        forward, inside = layer.forward, []

        def only_inside(*args, **kwargs):
            assert inside[-1], "runs in the model only"
            return forward(*args, **kwargs)

        layer.forward = only_inside
        model.register_forward_pre_hook(lambda *_: inside.append(True))
        model.register_forward_hook(lambda *_: inside.append(False))
        report = audit(model, inputs=("all",), gradients=False)
        # The audit looks for the leak again, separately, after the model.
        found = [(leak.module, leak.kind) for leak in report.leaks if leak.module]
        self.assertEqual(found, [("model.layers.0.linear_attn", "other")])

    def test_not_a_number_spreads(self):
        model = qwen3_5()
        first_token = audit_ids(model)[0]

        def change(x):
            # Document 3 starts at token 58.
            return x if ids[-1][0, 0] == first_token else x.index_fill(1, torch.tensor([58]), float("nan"))

        ids = []
        model.register_forward_pre_hook(lambda _, args, kwargs: ids.append(kwargs["input_ids"]), with_kwargs=True)
        plant_in_output(model.model.layers[3].mlp, when_packed(model, change))
        report = audit(model, inputs=("all",), gradients=False)
        self.assertEqual([(leak.from_document, leak.to_document) for leak in report.leaks], [(0, 3)])
        self.assertEqual(AuditReport.from_json(report.to_json()), report)


class NoFalseAlarmTest(unittest.TestCase):
    def assertIsolated(self, model, inputs=("position_ids", "all"), **kwargs):
        report = audit(model, inputs=inputs, **kwargs)
        self.assertEqual(report.leaks, [], report.table())
        self.assertTrue(report.ok)
        self.assertEqual([result.verdict for result in report.sources.values()], ["isolated"] * len(inputs))
        for result in report.sources.values():
            # The measurement is sensitive: a document does change itself.
            self.assertTrue(all(result.influence[i][i] > 0.1 for i in range(len(report.lengths))))
        return report

    @parameterized.expand(
        [
            ("qwen3_5", qwen3_5, torch.float32, 0, None),
            ("qwen3_5_moe", qwen3_5_moe, torch.bfloat16, 1, LENGTHS),
            ("llama", llama, torch.bfloat16, 0, None),
            ("llama_eager", partial(llama, attn="eager"), torch.float32, 0, LENGTHS),
            # Models of the planted faults.
            ("gpt2", gpt2, torch.float32, 0, LENGTHS),
            ("qwen3_next", qwen3_next, torch.bfloat16, 0, LENGTHS),
        ]
    )
    def test_correct_models(self, _, make, dtype, seed, lengths):
        self.assertIsolated(make(dtype), seed=seed, lengths=lengths)

    def test_other_experts_run_in_batches(self):
        model = qwen3_5_moe()
        model.set_experts_implementation("grouped_mm")
        seen = set()
        model.register_forward_pre_hook(lambda module, _: seen.add(module.config._experts_implementation))
        report = self.assertIsolated(model, inputs=("all",), lengths=[20, 1, 9])
        self.assertEqual(seen, {"batched_mm"})
        self.assertNotEqual(model.config._experts_implementation, "batched_mm")
        self.assertIn("experts ran as batched_mm", report.notes[0])

    def test_every_source(self):
        self.assertIsolated(qwen3_5(), inputs=("position_ids", "seq_idx", "cu_seq_lens", "all"))

    @parameterized.expand([(True,), (False,)])
    def test_gradient_checkpointing(self, reentrant):
        model = qwen3_5()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        calls = []
        model.model.layers[0].linear_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        self.assertIsolated(model, inputs=("all",), lengths=[20, 1, 9])
        # Seven forwards without gradients. For each document, one with gradients and one in backward.
        self.assertEqual(sum(calls), 3 if reentrant else 6)

    def test_peft(self):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(qwen3_5(), LoraConfig(target_modules=["q_proj", "in_proj_qkv"], lora_dropout=0.5))
        self.assertIsolated(model, inputs=("all",))
        plant_in_op(model.base_model.model.model.layers[0].linear_attn, "causal_conv1d_qkv", replace=no_boundaries)
        (leak,) = (leak for leak in audit(model, inputs=("all",), gradients=False).leaks if leak.module)
        self.assertEqual(leak.module, "base_model.model.model.layers.0.linear_attn")

    def test_dropout_is_left_out(self):
        model = llama()
        model.model.layers[0].self_attn.attention_dropout = 0.5
        self.assertIsolated(model, inputs=("all",), lengths=[20, 1, 9])
        self.assertEqual(model.model.layers[0].self_attn.attention_dropout, 0.5)

    @pytest.mark.slow
    def test_compiled(self):
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)
        compiled = torch.compile(llama(num_hidden_layers=1), backend="eager", dynamic=True)
        self.assertIsolated(compiled, inputs=("all",), lengths=[9, 1, 20])
        # A module that ignores these boundaries is found without the compiler.
        report = audit(compiled, inputs=("cu_seq_lens",), lengths=[9, 1, 20], gradients=False)
        self.assertEqual([leak.module for leak in report.leaks if leak.module], ["model.layers.0.self_attn"])

    def test_vision_language(self):
        set_seed(0)
        config = Qwen3_5Config(**vision_config({**TEXT, "initializer_range": 0.15}))
        model = modeling_qwen3_5.Qwen3_5ForConditionalGeneration._from_config(config)
        self.assertIsolated(model)
        for token in (VISION_START, IMAGE, VIDEO, 0):
            self.assertNotIn(token, audit_ids(model))


class SharedPromptsTest(unittest.TestCase):
    """In a row with shared prompts, an answer may depend on its prompt and on nothing else."""

    GROUPS = {"lengths": [9, 2, 7, 1, 6, 3, 5], "parent_of": [-1, -1, -1, 0, 0, 1, 0]}
    TREE = {"lengths": [9, 2, 1, 7, 6, 3, 5, 2], "parent_of": [-1, 0, 1, 2, 0, 1, 2, 6]}

    @parameterized.expand(
        [
            ("qwen3_next", qwen3_next, GROUPS),
            ("qwen3_5_moe_tree", qwen3_5_moe, TREE),
        ]
    )
    def test_isolated(self, _, make, row):
        report = audit(make(), **row)
        self.assertEqual(list(report.sources), ["parent_of"])
        self.assertTrue(report.ok, report)
        result = report.sources["parent_of"]
        for matrix in (result.influence, result.backward):
            for i, line in enumerate(matrix):
                for j, size in enumerate(line):
                    document = j
                    while document not in (i, -1):
                        document = row["parent_of"][document]
                    depends = document == i
                    self.assertEqual(size > 1e-3, depends, (i, j, size))
                    self.assertTrue(depends or size == 0)

    def test_answers_that_start_without_their_prompt(self):
        with mock.patch.object(prompts, "repeat_rows", lambda x, copies: x.index_select(0, copies.rows) * 0):
            report = audit(qwen3_5(), **self.GROUPS)
        self.assertEqual({leak.direction for leak in report.leaks}, {"alone"})
        self.assertLessEqual({3, 4, 5, 6}, {leak.to_document for leak in report.leaks})


class RefusalsTest(unittest.TestCase):
    def test_built_in_without_kernels(self):
        report = audit(qwen3_5(cls=BuiltinQwen3_5ForCausalLM))
        self.assertEqual(report.sources["all"].verdict, "refused")
        self.assertIn("ValueError: `causal_conv1d_fn` can't keep packed sequences apart", report.table())
        self.assertEqual(report.sources["position_ids"].verdict, "leaks")
        self.assertFalse(report.ok)
        self.assertFalse(report.refused)

    def test_not_causal(self):
        model = llama()
        plant_in_output(model.model.layers[1].mlp, lambda x: x + 0.01 * x.mean(1, keepdim=True))
        report = audit(model)
        self.assertTrue(report.refused)
        self.assertFalse(report.ok)
        self.assertIn("not causal", report.sources["all"].reason)

    def test_random(self):
        model = llama()
        plant_in_output(model.model.layers[1].mlp, lambda x: x * torch.rand_like(x))
        self.assertIn("two runs on the same row differ", audit(model).sources["all"].reason)
        model = llama()
        plant_in_output(model.model.layers[1].mlp, when_packed(model, lambda x: x * torch.rand_like(x)))
        report = audit(model)
        self.assertIn("two runs on the same row differ", report.sources["all"].reason)
        self.assertEqual(report.sources["position_ids"].verdict, "isolated")

    def test_only_one_source_is_refused(self):
        model = llama()
        forward = model.forward

        def refuses(*args, seq_idx=None, **kwargs):
            if seq_idx is not None:
                raise TypeError("unexpected seq_idx")
            return forward(*args, **kwargs)

        model.forward = refuses
        report = audit(model)
        self.assertEqual(report.sources["all"].reason, "TypeError: unexpected seq_idx")
        self.assertEqual(report.sources["position_ids"].verdict, "isolated")
        self.assertTrue(report.ok)

    def test_no_gradient(self):
        """Documents isolated in forward may leak in backward. A leak in forward is a leak."""
        model = llama()
        plant_in_output(model.model.norm, torch.Tensor.detach)
        report = audit(model, inputs=("seq_idx", "all"))
        self.assertEqual(report.sources["all"].verdict, "refused")
        self.assertIn("backward: RuntimeError", report.sources["all"].reason)
        self.assertEqual(report.sources["seq_idx"].verdict, "leaks")
        self.assertIn("seq_idx: backward: RuntimeError", report.notes[0])
        self.assertFalse(report.ok)
        self.assertTrue(audit(model, inputs=("all",), gradients=False).ok)

    def test_tolerance(self):
        model = llama()
        self.assertFalse(audit(model, inputs=("all",), gradients=False, tolerance=0.0).ok)
        report = audit(model, inputs=("seq_idx",), tolerance=10.0)
        self.assertTrue(report.ok)
        self.assertEqual(set(report.sources["seq_idx"].thresholds.values()), {10.0})

    @parameterized.expand(
        [
            ({"lengths": [5]}, "lengths of at least two documents"),
            ({"inputs": ("everything",)}, "inputs among"),
            ({"inputs": ()}, "inputs among"),
            ({"lengths": [3, 4], "parent_of": [-1, 1]}, "expected parent_of for 2 documents"),
            ({"model": torch.nn.Linear(2, 2)}, "expected a Transformers model.*got Linear"),
        ]
    )
    def test_arguments(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            audit(**{"model": llama(), **arguments})

    def test_a_model_without_weights(self):
        with torch.device("meta"):
            model = llama()
        with self.assertRaisesRegex(
            ValueError, "a model with weights, got model.embed_tokens on the meta device. Load"
        ):
            audit(model)
        model = llama()
        model.model.layers[1].mlp.up_proj.to("meta")
        with self.assertRaisesRegex(ValueError, "got model.layers.1.mlp.up_proj on the meta device"):
            audit(model)
        # Weights offloaded by accelerate are present while their layer runs.
        model = llama()
        accelerate.cpu_offload(model.model.layers[0], execution_device="cpu")
        self.assertTrue(next(model.model.layers[0].parameters()).is_meta)
        self.assertTrue(audit(model, lengths=[5, 6], gradients=False).ok)


class StateTest(unittest.TestCase):
    @parameterized.expand([("leaks",), ("refused",)])
    def test_the_model_comes_back_as_it_was(self, verdict):
        model = qwen3_5_moe()
        if verdict == "leaks":
            plant_in_op(model.model.layers[0].linear_attn, "causal_conv1d_qkv", replace=no_boundaries)
        if verdict == "refused":
            plant_in_output(model.model.layers[3].mlp, lambda x: x[:, 1:])
        model.eval()
        model.model.layers[1].train()
        model.model.layers[2].mlp.requires_grad_(False)
        model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
        # A forward that draws random numbers and counts in a buffer.
        model.register_buffer("calls", torch.zeros(1))

        def count(*_):
            model.calls.add_(torch.rand(1))

        model.lm_head.register_forward_hook(count)
        torch.manual_seed(7)
        random.seed(7)

        def state():
            return {
                "modules": [
                    {k: (id(v), dict(v) if isinstance(v, dict) else v) for k, v in vars(m).items()}
                    for m in model.modules()
                ],
                "config": str(model.config.to_dict()) + str(vars(model.config)),
                "parameters": [(p.requires_grad, id(p.grad), p.detach().sum().item()) for p in model.parameters()],
                "buffers": [(id(b), b.sum().item()) for b in model.buffers()],
                "random": (torch.get_rng_state().tolist(), random.getstate()),
            }

        before = state()
        report = audit(model, lengths=[20, 1, 30])
        self.assertEqual(report.sources["all"].verdict, verdict, report.table())
        after = state()
        for name in before:
            self.assertEqual(str(before[name]), str(after[name]), name)
