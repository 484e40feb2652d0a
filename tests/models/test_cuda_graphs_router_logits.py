"""Logits of routers that forwards return, such as for the load balancing loss, with CUDA graphs. `tests/gpu` has a GPU."""

import tempfile

import torch
from common.recordings import OTHERS, ROW_LENGTH, RunsAgain, models_of, row_of
from common.records import make_tokenizer
from datasets import Dataset
from mixins.recorded import ROWS, RecordedTestCase, enable_checkpointing
from parameterized import parameterized
from trl import SFTConfig, SFTTrainer

from transformers_packed import configure_packing, use_cuda_graphs


def balanced(*models):
    for model in models:
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
    return models


class RouterLogitsTest(RecordedTestCase):
    @parameterized.expand([(step, attention) for step in (0, 1, 2) for attention in (True, False)])
    def test_computes_what_the_layers_do(self, step, attention):
        graphed, plain = balanced(*models_of("qwen3_5_moe", attention=attention))
        if step:
            enable_checkpointing(graphed, step)
        rows = [row_of(ROWS[lengths]) for lengths in ("several", "seven", "full", "one document")]
        for row in rows:
            found, expected = (model(**row) for model in (graphed, plain))
            self.assertEqual([x.shape for x in found.router_logits], [x.shape for x in expected.router_logits])
            for a, b in zip(found.router_logits, expected.router_logits, strict=True):
                torch.testing.assert_close(a, b)
            self.assertGreater(float(found.aux_loss), 0)
            found.loss.backward()
            self.assert_same_step(graphed, plain, row)
        self.assertEqual((RunsAgain.replayed, self.warnings), (4 * len(rows), []))

    def test_alone(self):
        """The gradient of the output is zero then."""
        graphed, plain = models_of("qwen3_5_moe")
        row = row_of([20, 30])
        found = []
        for model in (graphed, plain):
            logits = model(**row, output_router_logits=True).router_logits
            # Those of the second and the fourth layer.
            (logits[1].sin().sum() + logits[3].cos().sum()).backward()
            found.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
        actual, expected = found
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient)
        self.assertTrue(all(not x.any() for name, x in actual.items() if name not in expected))
        self.assertEqual((RunsAgain.replayed, self.warnings), (2, []))

    @parameterized.expand([False, True])
    def test_frozen(self, checkpointing):
        """The logits of the first layer have no gradient then."""
        graphed, plain = balanced(*models_of("qwen3_5_moe"))
        for model in (graphed, plain):
            model.model.requires_grad_(False)
            model.model.layers[1].mlp.experts.requires_grad_(True)
        if checkpointing:
            enable_checkpointing(graphed, 1, inputs=False)
        self.assert_same_step(graphed, plain, row_of([20, 30]), row_of([9, 8]))
        self.assertEqual((RunsAgain.replayed, self.warnings), (4, []))

    def test_rows_with_and_without(self):
        graphed, plain = models_of("qwen3_5_moe")
        row = row_of([20, 30])
        for number in range(4):
            options = {"output_router_logits": True} if number % 2 else {}
            self.assert_same_step(graphed, plain, row | options)
            self.assertEqual(graphed(**row, **options).router_logits is None, not options)
            graphed.zero_grad()
        self.assertEqual(self.warnings, [])
        # One row of each kind is recorded.
        self.assertEqual(RunsAgain.made, 4)

    def test_no_list_of_another_forward(self):
        """A recording within a forward that returns logits adds those of its warm-ups to none."""
        graphed, plain = models_of("qwen3_5_moe")
        number = len(plain(**row_of([20, 30]), output_router_logits=True).router_logits)
        for _ in range(2):
            output = graphed(**row_of([20, 30]), output_router_logits=True)
            self.assertEqual(len(output.router_logits), number)
            output.loss.backward()
        self.assertEqual(RunsAgain.replayed, 4)

    @parameterized.expand([name for name in ("kimi_linear", "bailing_hybrid") if name in OTHERS])
    def test_of_other_families(self, name):
        graphed, plain = models_of(name)
        row = row_of([20, 30])
        found, expected = (model(**row, output_router_logits=True) for model in (graphed, plain))
        for a, b in zip(found.get("router_logits") or (), expected.get("router_logits") or (), strict=True):
            torch.testing.assert_close(a, b)
        found.loss.backward()
        self.assert_same_step(graphed, plain, row)
        self.assertEqual(self.warnings, [])

    def test_trl(self):
        """`SFTTrainer` trains mixtures with the load balancing loss, unless a user turns it off."""
        samples = [{"input_ids": [3 + (7 * i + j) % 90 for j in range(20)]} for i in range(12)]
        folder = self.enterContext(tempfile.TemporaryDirectory())
        options = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3}
        options |= {"max_length": None, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no"}
        found = []
        for model, max_length in zip(models_of("qwen3_5_moe"), (ROW_LENGTH, 0), strict=True):
            args = SFTConfig(folder, **options)
            data = Dataset.from_list(samples)
            trainer = SFTTrainer(model, args=args, train_dataset=data, processing_class=make_tokenizer())
            configure_packing(trainer, "padding_free", verify=False, cuda_graphs=False)
            use_cuda_graphs(trainer.model, max_length)
            trainer.train()
            logs = [log for log in trainer.state.log_history if "loss" in log]
            found.append([log[name] for log in logs for name in ("loss", "aux_loss", "grad_norm")])
        self.assertEqual(len(found[0]), 9)
        torch.testing.assert_close(*found, rtol=1e-5, atol=0)
        self.assertEqual((RunsAgain.replayed, self.warnings), (6, []))
