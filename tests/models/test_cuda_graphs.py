"""CUDA graphs without the graphs: on a CPU, a recording runs its function again."""

import copy
import pickle
import unittest
import weakref
from functools import partial
from importlib.util import find_spec
from unittest import mock

import peft
import torch
import torch.distributed as dist
from common.families import tiny_model
from common.late_copies import on_a_cpu
from common.processes import run_processes
from common.recordings import MODELS, OTHERS, ROW_LENGTH, RunsAgain, models_of, recordings_on_a_cpu, row_of
from mixins.model import total_relative_error
from mixins.recorded import ROWS, RecordedTestCase, count_calls, enable_checkpointing, freeze, move, trained
from parameterized import parameterized
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import set_seed

from transformers_packed import SequenceBoundaries, patch_model, use_cuda_graphs
from transformers_packed.models import cuda_graphs, recordings
from transformers_packed.models.checkpointing import bytes_on_host
from transformers_packed.models.families import EXPERT_WEIGHTS, family_named
from transformers_packed.models.quantization import initialize_in_4bit, nf4
from transformers_packed.models.quantized_weights import has_parts
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops.backends import chunk_indices
from transformers_packed.ops.invariance import set_batch_invariant


class Scaled(torch.nn.SiLU):
    def __init__(self):
        super().__init__()
        self.scale, self.scales = 1.0, {"adapter": 1.0}

    def forward(self, x):
        return super().forward(x) * self.scale * self.scales["adapter"]


def change_mode(model, training):
    # Evaluation has no dropout.
    model.model.layers[3].self_attn.attention_dropout = 1.0 - training
    model.model.layers[3].train(training)


def set_scale(model, number):
    """A recording keeps the Python values that it read."""
    mlp = model.model.layers[1].mlp
    if number == 0:
        mlp.act_fn = Scaled()
    elif number == 1:
        mlp.act_fn.scale = 0.5
    elif number == 2:
        mlp.act_fn.scales["adapter"] = 2.0
    else:
        mlp.act_fn.scales = {"adapter": 3.0}


def share(model, number):
    if number:
        first, second, *_ = model.model.layers
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
        model.model.layers[2].mlp = first.mlp


def checkpoint_graphed(model, number):
    if number and getattr(model.model, "layer_graphs", None):
        enable_checkpointing(model, 1)


def replace_parameters(model, number):
    """The same memory in other parameters."""
    if number:
        model.load_state_dict(model.state_dict(), assign=True)


# Changes of both models, and how many values each has, one after the other.
CHANGES = {
    "frozen_parameters": (freeze, 2),
    "only_the_embeddings_are_trained": (lambda model, number: model.model.layers.requires_grad_(not number), 2),
    "shared_parameters": (share, 2),
    "mode": (lambda model, number: change_mode(model, number == 0), 2),
    "moved_parameters": (move, 2),
    "replaced_parameters": (replace_parameters, 2),
    "settings": (set_scale, 4),
    "buffers": (
        lambda model, number: model.model.layers[1].mlp.register_buffer("adapter", torch.full((3,), number)),
        2,
    ),
    "checkpointing": (checkpoint_graphed, 2),
    "kernels": (lambda model, number: set_batch_invariant(number > 0), 2),
}


def add_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def compile_layer(model):
    model.model.layers[1].mlp._compiled_call_impl = model.model.layers[1].mlp._call_impl


def train_the_head(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.requires_grad_(False)


def drop_under_checkpointing(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(1e-9))
    enable_checkpointing(model, 1)


# What graphs cannot record: the reason, the model, a change and the row.
UNRECORDED = [
    ("more than max_length=128 tokens", "qwen3_5", lambda model: None, [100, 29]),
    ("neither the layers nor their input require gradients", "qwen3_5", train_the_head),
    ("the kernels of the experts depend on the routing", "qwen3_5_moe",
     lambda model: model.set_experts_implementation("grouped_mm")),
    ("a Qwen3_5MLP is hooked, wrapped or compiled", "qwen3_5", add_hook),
    ("a Qwen3_5MLP is hooked, wrapped or compiled", "qwen3_5", compile_layer),
    ("repeat the dropout", "qwen3_5", drop_under_checkpointing),
]  # fmt: skip


def steps_under_ddp():
    """Return the gradients of two rows of this rank, with graphs and without, and the number of replays."""
    with recordings_on_a_cpu():
        gradients = []
        for model in models_of():
            wrapped = DistributedDataParallel(model)
            for seed in range(2):
                wrapped(**row_of([20, 30 + dist.get_rank()], seed=2 * dist.get_rank() + seed)).loss.backward()
            gradients.append(trained(model))
        return *gradients, RunsAgain.replayed


class CudaGraphsTest(RecordedTestCase):
    @parameterized.expand(["qwen3_5", "qwen3_5_moe"])
    def test_computes_what_the_layers_do(self, name):
        graphed, plain = models_of(name)
        rows = [row_of(lengths) for lengths in ROWS.values()][:: 1 if name == "qwen3_5" else 2]
        for row in rows:
            self.assert_same_step(graphed, plain, row)
        # Forward and backward, each for up to 6, 30 and more documents.
        self.assertEqual(RunsAgain.made, 6 if name == "qwen3_5" else 4)
        self.assertEqual(RunsAgain.replayed, 2 * len(rows))
        self.assertEqual(self.warnings, [])
        # Gradients add up.
        self.assert_same_step(graphed, plain, *rows[:3])

    @parameterized.expand(OTHERS)
    def test_of_other_families(self, name):
        """Some have no position embeddings, or have them in layers of attention alone."""
        graphed, plain = models_of(name)
        has_positions = getattr(graphed.model, "rotary_emb", None) is not None
        self.assertEqual(has_positions, name in ("bailing_hybrid", "olmo_hybrid"))
        for lengths in ("several", "full", "seven"):
            self.assert_same_step(graphed, plain, row_of(ROWS[lengths]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, self.warnings), (4, 6, []))
        # Without a graph, all layers get the same.
        self.assert_same_step(graphed, plain, row_of([100, 29]))
        self.assertIn("more than max_length", self.warnings[0])
        self.assertEqual(RunsAgain.replayed, 6)
        enable_checkpointing(graphed, 1)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual(RunsAgain.replayed, 8)

    @parameterized.expand([(name,) for name in CHANGES])
    def test_records_again_after_a_change_of(self, name):
        change, values = CHANGES[name]
        self.addCleanup(set_batch_invariant, False)
        graphed, plain = models_of()
        for number in range(values):
            for model in (graphed, plain):
                change(model, number)
            self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual(RunsAgain.made, 2 * values)
        if name in ("moved_parameters", "settings"):
            self.assertIn("recording the graphs again because parameters, modes or settings", self.warnings[0])

    def test_a_switch_that_changes_nothing(self):
        graphed, plain = models_of()
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        enable_checkpointing(graphed, 1)
        for layer in graphed.model.layers:
            layer.gradient_checkpointing = False
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual((RunsAgain.made, self.warnings), (2, []))

    @parameterized.expand(UNRECORDED)
    def test_runs_without(self, reason, name, change, lengths=(20, 30)):
        graphed, plain = models_of(name)
        for model in (graphed, plain):
            change(model)
        self.assert_same_step(graphed, plain, row_of(lengths))
        self.assertEqual(RunsAgain.made, 0)
        self.assertIn(reason, self.warnings[0])

    def test_runs_without_under_hooks_on_what_is_kept(self):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            self.assert_same_step(*models_of(), row_of([20, 30]))
        self.assertIn("saved-tensor hook is active", self.warnings[0])

    def test_nothing_is_left_of_earlier_rows(self):
        graphed, plain = models_of()
        embeddings = torch.full((1, 100, 32), torch.nan, requires_grad=True)
        row = {"inputs_embeds": embeddings, "labels": torch.ones(1, 100).long(), "cu_seqlens": torch.tensor([0, 100])}
        graphed(**row).loss.backward()
        self.assert_same_step(graphed, plain, row_of([10, 20]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed), (2, 4))

    def test_results_are_not_the_graphs_own(self):
        graphed, _ = models_of()
        graphed.model.norm = torch.nn.Identity()
        first = graphed.model(input_ids=row_of([50])["input_ids"], cu_seqlens=torch.tensor([0, 50])).last_hidden_state
        first, before = first.detach(), first.detach().clone()
        graphed(**row_of([20, 30]))
        self.assertEqual(RunsAgain.replayed, 2)
        torch.testing.assert_close(first, before, rtol=0, atol=0)

    def test_lora(self):
        wrapped = []
        for model in models_of():
            set_seed(0)
            config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
            wrapped.append(peft.get_peft_model(model, config))
        self.assert_same_step(*wrapped, row_of([20, 30]), row_of([9, 8]))
        self.assertEqual((RunsAgain.replayed, self.warnings), (4, []))

    def test_under_ddp(self):
        results = run_processes(steps_under_ddp, 2)
        for found, expected, replayed in results:
            self.assertEqual(set(found), set(expected))
            self.assertLess(total_relative_error(found, expected), 1e-6)
            self.assertLess(total_relative_error(found, results[0][0]), 1e-6)
            self.assertEqual(replayed, 4)

    def test_a_parameter_that_changes_before_backward_is_an_error(self):
        graphed, _ = models_of()
        loss = graphed(**row_of([20, 30])).loss
        with torch.no_grad():
            graphed.model.layers[1].mlp.up_proj.weight.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "changed in place"):
            loss.backward()

    def test_not_where_nothing_is_trained(self):
        graphed, plain = models_of()
        row = row_of([20, 30])
        with torch.no_grad():
            graphed(**row)
        graphed.eval()(**row).loss.backward()
        self.assertEqual(RunsAgain.made, 0)
        self.assertEqual(self.warnings, [])

    @parameterized.expand([("qwen3_5", 1), ("qwen3_5_moe", 2)])
    def test_checkpointing(self, name, step):
        """The backward computes the layers again but for the last product, and the graphs save nothing else of them."""
        graphed, plain = models_of(name)
        enable_checkpointing(graphed, step)
        calls, ends = count_calls(graphed)
        rows = [row_of(ROWS[lengths]) for lengths in ("several", "seven")]
        for row in rows:
            self.assert_same_step(graphed, plain, row)
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, self.warnings), (4, 2 * len(rows), []))
        # Two warm-ups and a recording for each of two graphs, and the rows.
        runs, again = 2 * 3 + len(rows), 2 + len(rows)
        self.assertEqual(ends, [runs] * 4)
        self.assertEqual(calls, [runs + again, runs + again * (step == 1)] * 2)
        switches = [layer.gradient_checkpointing for layer in graphed.model.layers]
        self.assertEqual(switches, [True, step == 1] * 2)

    @parameterized.expand([False, True])
    def test_a_frozen_layer_with_an_unused_parameter(self, checkpointing):
        """Such as that of an adapter that is not active."""
        graphed, plain = models_of()
        for model in (graphed, plain):
            model.model.embed_tokens.requires_grad_(False)
            model.model.layers[0].requires_grad_(False).unused = torch.nn.Parameter(torch.zeros(1))
        if checkpointing:
            enable_checkpointing(graphed, 1, inputs=False)
        self.assert_same_step(graphed, plain, row_of([20, 30]), row_of([9, 8]))
        self.assertEqual((RunsAgain.replayed, self.warnings), (4, []))

    def test_the_backward_frees_inputs_of_layers_and_their_gradients(self):
        """Otherwise the memory of the graphs has those of all layers until its end."""
        graphed, _ = models_of()
        enable_checkpointing(graphed, 1)
        differentiate, earlier, alive = torch.autograd.grad, [], []

        def watched(output, leaves, gradient, **options):
            alive.append(sum(reference() is not None for reference in earlier))
            found = differentiate(output, leaves, gradient, **options)
            # The next layer below takes this gradient.
            earlier.extend(map(weakref.ref, (leaves[0], found[0])))
            return found

        with mock.patch.object(torch.autograd, "grad", watched):
            graphed(**row_of(ROWS["several"]))
        # The gradient that the layer gets.
        self.assertEqual(alive[:4], [0, 1, 1, 1])

    def test_recordings_of_all_rows_have_the_same_buffers(self):
        graphed, _ = models_of("attention_between", attention=False)
        for lengths in ("several", "seven"):
            graphed(**row_of(ROWS[lengths])).loss.backward()
        (_, first), (_, second) = graphed.model.layer_graphs._graphs.values()
        places = [[x._input.data_ptr() for x in recorded.values()] for recorded in (first, second)]
        self.assertEqual(*places)
        # Each input is read until the backward.
        self.assertEqual(len(set(places[0])), 2)

    def test_warm_ups_need_the_memory_of_one_layer(self):
        """Earlier recordings keep the activations of a row, and a second row of them may not fit beside these."""
        graphed, _ = models_of()
        run, saved, counts = recordings.RecordedLayers._run, weakref.WeakSet(), []

        class Saved:
            def __init__(self, tensor):
                self.tensor = tensor
                saved.add(self)

        def watched(recording, layers, x):
            with torch.autograd.graph.saved_tensors_hooks(Saved, lambda kept: kept.tensor):
                output = run(recording, layers, x)
            counts.append(len(saved))
            return output

        with mock.patch.object(recordings.RecordedLayers, "_run", watched):
            graphed(**row_of(ROWS["several"]))
        # Two warm-ups of four layers, the recording and its replay.
        self.assertEqual(len(counts), 2 * 4 + 2)
        self.assertLess(max(counts[:8]), 0.4 * counts[8])

    @parameterized.expand([(True,), (False,)])
    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_weights_in_4_bit(self, checkpointing):
        with torch.device("meta"):
            plain = MODELS["qwen3_5_moe"]()
        set_seed(0)
        initialize_in_4bit(plain, nf4(torch.float32), torch.device("cpu"))
        config = {"target_modules": "all-linear", "target_parameters": list(EXPERT_WEIGHTS)}
        plain = peft.get_peft_model(plain, peft.LoraConfig(r=4, init_lora_weights=False, **config)).train()
        weights = [x for x in plain.parameters() if has_parts(x)]
        self.assertEqual({type(x).__name__ for x in weights}, {"Params4bit", "ExpertsIn4bit"})
        graphed = copy.deepcopy(plain)
        use_cuda_graphs(graphed, ROW_LENGTH)
        if checkpointing:
            for model in (graphed, plain):
                enable_checkpointing(model.base_model.model, 1)
        self.assert_same_step(graphed, plain, row_of([20, 30]), row_of([9, 8]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, self.warnings), (2, 4, []))
        # A graph would read the old bytes.
        for model in (graphed, plain):
            weight = next(x for x in model.parameters() if type(x).__name__ == "Params4bit")
            weight.quant_state.absmax = weight.quant_state.absmax.clone()
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual(RunsAgain.made, 4)

    def test_checkpointing_with_frozen_and_shared_parameters(self):
        graphed, plain = models_of()
        for model in (graphed, plain):
            first, second, third, _ = model.model.layers
            third.mlp.up_proj.weight = first.mlp.up_proj.weight
            model.model.embed_tokens.requires_grad_(False)
            second.requires_grad_(False)
            first.input_layernorm.requires_grad_(False)
        enable_checkpointing(graphed, 1, inputs=False)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        for model in (graphed, plain):
            model.model.layers[:2].requires_grad_(False)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual((RunsAgain.replayed, len(self.warnings)), (4, 1))

    def test_checkpointing_that_offloads_or_selects(self):
        graphed, plain = models_of()
        for function in (partial(checkpoint, context_fn=None), lambda function, *args: function(*args)):
            enable_checkpointing(graphed, 1)
            for layer in graphed.model.layers:
                layer._gradient_checkpointing_func = function
            self.assertIn("offloads or selects", cuda_graphs.reason_of_layers(graphed.model, torch.device("cpu")))

    @unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
    def test_checkpoints_that_go_to_the_host_by_themselves(self):
        """A graph keeps them, and other rows go on as before."""
        graphed, plain = models_of()
        for asked in (True, "auto"):
            graphed.activation_checkpointing_enable(offload=asked)
            reason = cuda_graphs.reason_of_layers(graphed.model, torch.device("cpu"))
            self.assertEqual(bool(reason), asked is True, reason)
        with on_a_cpu(64):
            self.assert_same_step(graphed, plain, row_of([100, 29]))
            self.assertEqual(bytes_on_host(graphed), 4 << 16)
            self.assertEqual(RunsAgain.replayed, 0)
            self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, len(self.warnings)), (2, 2, 1))
        graphed.activation_checkpointing_enable(offload=True)
        self.assertEqual(bytes_on_host(graphed), 0)

    def test_fewer_layers(self):
        graphed, plain = models_of()
        for model in (graphed, plain):
            model.config.num_hidden_layers = 2
        self.assert_same_step(graphed, plain, row_of([20, 30]))

    def test_outputs_of_layers(self):
        graphed, plain = models_of()
        row = row_of([20, 30])
        found, expected = (model(**row, output_hidden_states=True).hidden_states for model in (graphed, plain))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        self.assertIn("output_hidden_states", self.warnings[0])
        # Transformers' hooks stay, without effect.
        self.assert_same_step(graphed, plain, row)
        self.assertEqual(RunsAgain.made, 2)

    def test_parameters_elsewhere(self):
        graphed, _ = models_of()
        graphed.model.layers[0].mlp.up_proj.to("meta")
        graphed(**row_of([20, 30]))
        self.assertIn("a Parameter on meta", self.warnings[0])

    def test_two_forwards_before_their_backwards(self):
        graphed, plain = models_of()
        rows = [row_of([20, 30], seed) for seed in (1, 2)]
        for model in (graphed, plain):
            losses = [model(**row).loss for row in rows]
            for loss in reversed(losses):
                loss.backward()
        self.assertLess(total_relative_error(trained(graphed), trained(plain)), 1e-6)
        self.assertEqual(RunsAgain.replayed, 2)
        self.assertIn("backward of an earlier row has not run yet", self.warnings[0])
        # A forward without a backward does not block later ones.
        graphed(**rows[0])
        self.assert_same_step(graphed, plain, rows[1])
        self.assertEqual(RunsAgain.replayed, 5)

    def test_backward_twice_is_an_error(self):
        self.assert_backward_runs_once(models_of()[0])

    def test_copies_make_graphs_of_their_own(self):
        graphed, plain = models_of()
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        for other in (copy.deepcopy(graphed), pickle.loads(pickle.dumps(graphed))):
            made = RunsAgain.made
            self.assert_same_step(other, plain, row_of([20, 30]))
            self.assertEqual(RunsAgain.made, made + 2)

    def test_refuses(self):
        dense, _ = models_of()
        calls = [(dense, 100, "multiple of 64"), (dense, 2048.0, "multiple of 64")]
        calls.append((torch.nn.Linear(2, 2), 128, "patch_model"))
        if family_named("qwen4_exp").is_supported:
            calls.append((patch_model(tiny_model("qwen4_exp")), 128, "got Qwen4Exp.*. Train it without CUDA graphs"))
            calls.append((tiny_model("kimi_linear"), 128, "got KimiLinearForCausalLM. .*patch_model"))
        for model, length, expected in calls:
            with self.assertRaisesRegex(ValueError, expected):
                use_cuda_graphs(model, length)


class OpenBoundariesTest(unittest.TestCase):
    def boundaries(self, lengths, slots):
        real = SequenceBoundaries.from_lengths(lengths)
        total = real.total_length
        ends = torch.full((slots + 1,), total, dtype=torch.int32)
        ends[: len(lengths) + 1] = real.cu_seqlens
        return real, recordings._open_boundaries(ends, total)

    @parameterized.expand([(str(lengths), lengths) for lengths in ([128], [1, 63, 64], [65, 63], [1] * 7 + [121])])
    def test_like_those_of_the_row(self, _, lengths):
        real, open_ended = self.boundaries(lengths, 9)
        self.assertEqual(open_ended.seq_idx.tolist(), real.seq_idx.tolist())
        self.assertEqual(open_ended.position_ids.tolist(), real.position_ids.tolist())
        self.assertEqual((open_ended.total_length, open_ended.num_documents, open_ended.max_length), (128, 9, 128))
        expected, found = chunk_indices(real).tolist(), chunk_indices(open_ended).tolist()
        self.assertEqual(found[: len(expected)], expected)
        # The same number for any documents. The rest goes to the last one, which has no token.
        self.assertEqual(len(found), 128 // 64 + 9)
        self.assertEqual({document for document, _ in found[len(expected) :]}, {8})

    def test_nothing_is_read_on_the_host(self):
        _, open_ended = self.boundaries([64, 64], 9)
        for read in (lambda: open_ended.lengths, lambda: open_ended.cu_seqlens_cpu):
            with self.assertRaisesRegex(ValueError, "train without graphs"):
                read()
