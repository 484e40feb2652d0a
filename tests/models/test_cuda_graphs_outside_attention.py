"""CUDA graphs of layers between those of attention, which run outside of them, without the graphs: on a CPU."""

import copy
import pickle
from unittest import mock

import torch
from common.recordings import OTHERS, ROW_LENGTH, SIZES, RunsAgain, models_of, row_of
from mixins.model import total_relative_error
from mixins.recorded import ROWS, RecordedTestCase, count_calls, enable_checkpointing, freeze, move, trained
from parameterized import parameterized
from transformers import Qwen3_5TextConfig, set_seed

from transformers_packed import use_cuda_graphs
from transformers_packed.models import cuda_graphs
from transformers_packed.models.inspections import InspectedLayers
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM


def hook_on(model, number, calls):
    """A hook that changes the output of a layer's MLP."""

    def scale(module, args, output):
        calls.append(number)
        return 2 * output

    return model.model.layers[number].mlp.register_forward_hook(scale)


def replace_activation(layer):
    """A module without parameters."""
    layer.mlp.act_fn = torch.nn.GELU()


def move_weight(layer):
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 2


def change_setting(layer):
    layer.input_layernorm.eps = 0.5


# Changes of one layer.
CHANGES_OF_A_LAYER = {
    "where a parameter is": move_weight,
    "what is trained": lambda layer: layer.mlp.requires_grad_(False),
    "the mode of a layer": lambda layer: layer.train(False),
    "a setting": change_setting,
    "a module": replace_activation,
}


class AttentionOutsideTest(RecordedTestCase):
    """Layers of attention run between the graphs of the others."""

    def models(self):
        return models_of("attention_between", attention=False)

    def test_computes_what_the_layers_do(self):
        graphed, plain = self.models()
        rows = [row_of(lengths) for lengths in ROWS.values()]
        calls, _ = count_calls(graphed)
        for row in rows:
            self.assert_same_step(graphed, plain, row)
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, self.warnings), (3 * 4, 4 * len(rows), []))
        # Two warm-ups and a recording for each of three graphs, and the rows.
        recorded = 3 * 3 + len(rows)
        self.assertEqual(calls, [recorded, len(rows), recorded, recorded])
        self.assert_same_step(graphed, plain, *rows[:3])

    @parameterized.expand(OTHERS)
    def test_of_other_families(self, name):
        """Kimi-Linear has one name for layers of attention and those of its delta rule."""
        graphed, plain = models_of(name, attention=False)
        calls, _ = count_calls(graphed)
        self.assertAlmostEqual(cuda_graphs.share_of_attention(graphed), 1 / 3)
        for lengths in ("several", "full"):
            self.assert_same_step(graphed, plain, row_of(ROWS[lengths]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, self.warnings), (4, 8, []))
        self.assertEqual(calls, [5, 2, 5])

    def test_checkpointing(self):
        graphed, plain = self.models()
        enable_checkpointing(graphed, 1)
        calls, _ = count_calls(graphed)
        rows = [row_of(ROWS[lengths]) for lengths in ("several", "seven")]
        for row in rows:
            self.assert_same_step(graphed, plain, row)
        recorded = 2 * 4 + 2 * len(rows)
        # Outside, torch's checkpoint calls what is inside of the counted call again.
        self.assertEqual(calls, [recorded, len(rows), recorded, recorded])
        self.assertEqual(self.warnings, [])

    def test_parameters_that_are_frozen_or_shared(self):
        graphed, plain = self.models()
        for model in (graphed, plain):
            first, second, third, _ = model.model.layers
            third.mlp.up_proj.weight = first.mlp.up_proj.weight
            second.mlp.down_proj.weight = first.mlp.down_proj.weight
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        for model in (graphed, plain):
            freeze(model, 1)
            model.model.layers[1].requires_grad_(False)
            first.mlp.requires_grad_(False)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        # Nothing before the third layer is trained, so the first run of layers has no backward.
        self.assertEqual((RunsAgain.made, RunsAgain.replayed), (4 + 3, 4 + 3))

    def test_an_input_without_a_gradient(self):
        """A trained parameter outside that does not reach the output."""
        graphed, plain = self.models()
        for model in (graphed, plain):
            model.requires_grad_(False)
            model.model.layers[1].unused = torch.nn.Parameter(torch.zeros(1))
            model.model.layers[2].mlp.up_proj.requires_grad_(True)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual(RunsAgain.replayed, 3)

    def test_each_backward_runs_once(self):
        graphed, plain = self.models()
        first, second = (row_of([20, 30], seed) for seed in (1, 2))
        loss = graphed(**first).loss
        graphed(**second).loss.backward()
        self.assertIn("backward of an earlier row has not run yet", self.warnings[0])
        graphed.zero_grad()
        loss.backward()
        plain(**first).loss.backward()
        self.assertLess(total_relative_error(trained(graphed), trained(plain)), 1e-6)
        self.assert_backward_runs_once(graphed)

    def test_modules_of_a_part_are_inspected_after_the_launch_of_the_part_before(self):
        """The host then looks at most modules while the GPU computes."""
        graphed, _ = self.models()
        numbers = {layer: number for number, layer in enumerate(graphed.model.layers)}
        events, inspect, replay = [], InspectedLayers.__init__, RunsAgain.replay

        def watched(inspected, layers, device):
            events.append([numbers[layer] for layer in layers])
            inspect(inspected, layers, device)

        def launched(recording):
            events.append("launch")
            return replay(recording)

        graphed(**row_of([20, 30]))
        graphed.model.layers[1].register_forward_hook(lambda *_: events.append("attention"))
        with mock.patch.object(InspectedLayers, "__init__", watched), mock.patch.object(RunsAgain, "replay", launched):
            graphed(**row_of([9, 8]))
            self.assertEqual(events, [[0], "launch", "attention", [2, 3], "launch"])
            events.clear()
            # All recorded layers before a recording.
            graphed(**row_of(ROWS["seven"]))
        self.assertEqual(events, [[0], [2, 3], "launch", "attention", "launch"])

    @parameterized.expand([(0,), (3,)])
    def test_a_hook_on_a_layer_of_a_part(self, number):
        """The layers of the part run one by one, and the other part as its graph."""
        graphed, plain = self.models()
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        calls = []
        handles = [hook_on(model, number, calls) for model in (graphed, plain)]
        for row in (row_of([20, 30], 2), row_of(ROWS["full"])):
            self.assert_same_step(graphed, plain, row)
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, len(calls)), (4, 4 + 2 * 2, 2 * 2))
        self.assertIn("a Qwen3_5MLP is hooked", self.warnings[0])
        # Nothing is recorded meanwhile.
        self.assert_same_step(graphed, plain, row_of(ROWS["seven"]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, len(calls)), (4, 8, 3 * 2))
        for handle in handles:
            handle.remove()
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed), (4, 12))

    def test_hooks_on_layers_outside(self):
        graphed, plain = self.models()
        calls = []
        for _ in range(2):
            for model in (graphed, plain):
                hook_on(model, 1, calls)
            self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed, len(calls), self.warnings), (4, 8, 2 + 4, []))

    @parameterized.expand([(name,) for name in CHANGES_OF_A_LAYER])
    def test_a_change_in(self, name):
        """The row ends without graphs, and the next one is recorded again."""
        change = CHANGES_OF_A_LAYER[name]
        # The last part, layers outside, and the first part, whose row is recorded at once.
        for number, made, replayed in ((3, 0, 2), (1, 0, 4), (0, 4, 4)):
            graphed, plain = self.models()
            self.assert_same_step(graphed, plain, row_of([20, 30]))
            for model in (graphed, plain):
                change(model.model.layers[number])
            RunsAgain.made = RunsAgain.replayed = 0
            self.warnings.clear()
            self.assert_same_step(graphed, plain, row_of([20, 30]))
            self.assertEqual((number, RunsAgain.made, RunsAgain.replayed), (number, made, replayed))
            self.assertEqual(["recording the graphs again" in line for line in self.warnings], [True] * (number != 1))
            self.assert_same_step(graphed, plain, row_of([9, 8]))
            self.assertEqual((number, RunsAgain.made), (number, 0 if number == 1 else 4))
            self.assertEqual(RunsAgain.replayed, replayed + 4)

    def test_a_part_between_others(self):
        layers = ["full_attention", "linear_attention"] * 3
        set_seed(0)
        plain = Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 6, "layer_types": layers})
        ).train()
        graphed = use_cuda_graphs(copy.deepcopy(plain), ROW_LENGTH, attention=False)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed), (6, 6))
        handles = [hook_on(model, 3, []) for model in (graphed, plain)]
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed), (6, 6 + 4))
        for handle in handles:
            handle.remove()
        # After a change, later parts have no graph either.
        for made, replayed in ((6, 10 + 2), (12, 12 + 6)):
            for model in (graphed, plain) if made == 6 else ():
                move_weight(model.model.layers[3])
            self.assert_same_step(graphed, plain, row_of([20, 30]))
            self.assertEqual((RunsAgain.made, RunsAgain.replayed), (made, replayed))

    def test_a_change_before_a_row_of_another_graph(self):
        graphed, plain = self.models()
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        for model in (graphed, plain):
            move(model, 1)
        for lengths in ("seven", "several"):
            self.assert_same_step(graphed, plain, row_of(ROWS[lengths]))
        self.assertEqual((RunsAgain.made, RunsAgain.replayed), (3 * 4, 3 * 4))
        self.assertIn("recording the graphs again", self.warnings[0])

    def test_other_layers(self):
        graphed, plain = self.models()
        for number, made in ((4, 4), (3, 8), (2, 10)):
            for model in (graphed, plain):
                model.config.num_hidden_layers = number
            self.assert_same_step(graphed, plain, row_of([20, 30]))
            self.assertEqual(RunsAgain.made, made)
        for model in (graphed, plain):
            model.model.layers[1] = model.model.layers[3]
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        # One part of two layers, and none outside.
        self.assertEqual(RunsAgain.made, 12)

    def test_a_row_that_waits_for_its_backward_while_its_graphs_are_forgotten(self):
        graphed, plain = self.models()
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        for model in (graphed, plain):
            model.zero_grad()
            move(model, 1)
            losses = [model(**row_of([20, 30], seed)).loss for seed in (1, 2)]
            for loss in losses:
                loss.backward()
        self.assertLess(total_relative_error(trained(graphed), trained(plain)), 1e-6)
        # Forward and backward of the first part, for the first of both rows.
        self.assertEqual((RunsAgain.made, RunsAgain.replayed), (4, 4 + 2))
        self.assertEqual(
            [line.split(" because ")[1] for line in self.warnings],
            [
                "parameters, modes or settings of the layers have changed.",
                "the backward of an earlier row has not run yet.",
            ],
        )
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        self.assertEqual(RunsAgain.made, 8)

    @parameterized.expand(["parameters outside", "a hook"])
    def test_an_input_that_gets_gradients(self, kind):
        """Its recording would return none."""
        graphed, plain = self.models()
        leaves = []
        for model in (graphed, plain):
            model.model.embed_tokens.requires_grad_(False)
            model.model.layers[:2].requires_grad_(False)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        for model in (graphed, plain):
            if kind == "a hook":
                # As in prompt tuning of a layer.
                leaves.append(torch.zeros(32, requires_grad=True))
                model.model.layers[1].register_forward_hook(lambda *args, leaf=leaves[-1]: args[-1] + leaf)
            else:
                model.model.layers[1].requires_grad_(True)
        for made in (3, 6, 6):
            self.assert_same_step(graphed, plain, row_of([20, 30]))
            self.assertEqual(RunsAgain.made, made)
        if leaves:
            torch.testing.assert_close(leaves[0].grad, leaves[1].grad)

    def test_an_input_of_another_dtype(self):
        graphed, plain = self.models()
        for model in (graphed, plain):
            model.model.layers[1].register_forward_hook(lambda *args: args[-1].bfloat16())
        for replayed in (2, 4):
            losses = []
            for model in (graphed, plain):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(model(**row_of([20, 30])).loss)
                losses[-1].backward()
            self.assertEqual(losses[0].item(), losses[1].item())
            self.assertEqual((RunsAgain.made, RunsAgain.replayed), (4, replayed))
        self.assertIn("changed the shape or the dtype of the hidden states", self.warnings[0])

    def test_a_part_without_a_backward_holds_back_no_later_row(self):
        """It has been recorded with one."""
        layers = ["linear_attention", "full_attention"] * 2 + ["linear_attention"]
        set_seed(0)
        options = SIZES | {"num_hidden_layers": 5, "layer_types": layers}
        plain = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options)).train()
        graphed = use_cuda_graphs(copy.deepcopy(plain), ROW_LENGTH, attention=False)
        for model in (graphed, plain):
            model.model.embed_tokens.requires_grad_(False)
            for number in (0, 2):
                model.model.layers[number].requires_grad_(False)
        self.assert_same_step(graphed, plain, row_of([20, 30]))
        for model in (graphed, plain):
            model.model.layers[1].requires_grad_(False)
        replayed, losses = [], []
        for row in (row_of([20, 30]), row_of([9, 8]), row_of([50])):
            before = RunsAgain.replayed
            losses.append(graphed(**row).loss)
            replayed.append(RunsAgain.replayed - before)
            losses[-1].backward()
        self.assertEqual(replayed, [3, 3, 3])
        self.assert_same_step(graphed, plain, row_of([20, 30]))

    def test_backwards_out_of_order_are_an_error(self):
        """The backward of the first part may overwrite what the last one has saved."""
        graphed, _ = self.models()
        outputs = []

        def cut(module, args, output):
            outputs.append(output)
            return output.detach().requires_grad_()

        graphed.model.layers[1].register_forward_hook(cut)
        loss = graphed(**row_of([20, 30])).loss
        outputs[0].sum().backward()
        with self.assertRaisesRegex(RuntimeError, "its activations are gone"):
            loss.backward()
        # In the order of the layers from the last one.
        loss = graphed(**row_of([20, 30])).loss
        loss.backward()
        outputs[1].sum().backward()

    def test_copies(self):
        graphed, _ = self.models()
        for other in (copy.deepcopy(graphed), pickle.loads(pickle.dumps(graphed))):
            cuda_graphs.forget_graphs(other)
            self.assertFalse(other.model.layer_graphs.attention)
