"""Steps of tiny models with CUDA graphs on a CPU, beside those of the same models without."""

import unittest
from unittest import mock

from common.recordings import RunsAgain, recordings_on_a_cpu, row_of
from mixins.model import total_relative_error

from transformers_packed.models import cuda_graphs


ROWS = {
    "one document": [50],
    "several": [3, 64, 1, 20],
    "full": [64, 60, 4],
    "six, as many as eight slots hold": [9, 8, 7, 6, 5, 4],
    "seven": [9, 8, 7, 6, 5, 4, 3],
    "more than 30": [3] * 33,
}


def trained(model):
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def enable_checkpointing(model, step, inputs=True):
    """Checkpoint each `step`-th layer. Releases differ in the method's name and arguments."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not inputs:
        model.disable_input_require_grads()
    for number, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = number % step == 0


def count_calls(model):
    """Return lists that count the calls of each layer, and those that end. A subclass counts, because graphs refuse hooks."""
    calls = [0] * len(model.model.layers)
    ends = [*calls]
    for number, layer in enumerate(model.model.layers):

        class Counted(type(layer)):
            def __call__(self, *args, number=number, **kwargs):
                calls[number] += 1
                output = super().__call__(*args, **kwargs)
                ends[number] += 1
                return output

        layer.__class__ = Counted
    return calls, ends


def freeze(model, number):
    if number:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(False)


def move(model, number):
    if number:
        weight = model.model.layers[2].mlp.up_proj.weight
        weight.data = weight.data * 2


class RecordedTestCase(unittest.TestCase):
    def setUp(self):
        RunsAgain.made = RunsAgain.replayed = 0
        self.enterContext(recordings_on_a_cpu())
        self.warnings = []
        self.enterContext(mock.patch.object(cuda_graphs.logger, "warning_once", self.warnings.append))

    def assert_same_step(self, graphed, plain, *rows):
        """Losses are the same, and so are the gradients of their sum, from successive backwards."""
        for model in (graphed, plain):
            model.zero_grad()
        for row in rows:
            a, b = graphed(**row).loss, plain(**row).loss
            self.assertAlmostEqual(a.item(), b.item(), delta=1e-6)
            a.backward()
            b.backward()
        found, expected = trained(graphed), trained(plain)
        self.assertEqual(set(found), set(expected))
        self.assertLess(total_relative_error(found, expected), 1e-6)

    def assert_backward_runs_once(self, graphed):
        row = row_of([20, 30])
        del row["labels"]
        output = graphed.model(**row).last_hidden_state.sum()
        output.backward(retain_graph=True)
        with self.assertRaisesRegex(RuntimeError, "backward has already run for this forward"):
            output.backward()
