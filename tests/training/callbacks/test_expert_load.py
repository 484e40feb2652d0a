"""The log of a mixture shows how evenly its tokens spread over its experts, as counted by the stock model."""

import copy
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from mixins.configure import said
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from scripts.expert_load_run import NUMBER, build, make_model, stock_counts
from scripts.trainer_arms import CONFIGS, run_in_two_processes
from transformers import AutoModelForCausalLM

from transformers_packed import patch_model, use_cuda_graphs
from transformers_packed.training.callbacks.expert_load import ExpertLoad
from transformers_packed.training.callbacks.verify import VerifyCallback


KEYS = {"expert_load_max", "experts_unused"}


class ExpertLoadTest(unittest.TestCase):
    def setUp(self):
        self.directory = self.enterContext(tempfile.TemporaryDirectory())
        # Its forwards would count as well.
        self.enterContext(mock.patch.object(VerifyCallback, "on_train_begin", return_value=None))

    def train(self, model=None, **options):
        figures, self.totals = ExpertLoad.figures, []

        def recorded(load):
            self.totals += [total[:, :-1].tolist() for total in load._totals]
            return figures(load)

        with mock.patch.object(ExpertLoad, "figures", recorded):
            trainer, counted = said(build, self.directory, model, **options)[1]
            said(trainer.train)
        return trainer, counted, [entry for entry in trainer.state.log_history if "loss" in entry]

    def check(self, entry: dict, batches: list[torch.Tensor]) -> None:
        counts = sum(batches)
        share = (counts / counts.sum(1, keepdim=True)).max()
        self.assertAlmostEqual(entry["expert_load_max"], float(share) * NUMBER, delta=1e-4)
        self.assertAlmostEqual(entry["experts_unused"], int((counts == 0).sum()) / counts.numel(), delta=1e-4)
        self.assertGreater(entry["expert_load_max"], 1.2)
        self.assertGreater(entry["experts_unused"], 0.1)

    def check_log(self, log: list[dict], counted: list[torch.Tensor]) -> None:
        self.assertEqual((len(log), len(counted)), (2, 8))
        for entry, batches in zip(log, (counted[:4], counted[4:]), strict=True):
            self.check(entry, batches)

    @parameterized.expand(
        [
            ("evaluation", {"eval_strategy": "steps", "eval_steps": 1}),
            ("checkpointing", {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ]
    )
    def test_counts_of_the_stock_router(self, name, options):
        checkpointed = "gradient_checkpointing_kwargs" in options
        _, counted, log = self.train(gradient_checkpointing=checkpointed, **options)
        self.check_log(log, counted)
        # The figures would be the same if each token counted twice.
        self.assertEqual(self.totals, [sum(batches).tolist() for batches in (counted[:4], counted[4:])])
        # Each entry shows the steps since the one before.
        self.assertNotEqual(log[0]["expert_load_max"], log[1]["expert_load_max"])

    @pytest.mark.slow
    def test_compiled(self):
        _, counted, log = self.train(torch_compile=True, torch_compile_backend="aot_eager")
        self.check_log(log, counted)

    def test_a_copied_router(self):
        """PEFT trains a copy of the router. The original does not run and does not count as unused."""
        model = patch_model(make_model())
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["o_proj"], modules_to_save=["gate"])
        _, counted, log = self.train(get_peft_model(model, config))
        self.check_log(log, counted)

    def test_weights_that_are_sharded_elsewhere(self):
        """DeepSpeed leaves an empty tensor where a weight is gathered for each use."""
        model = patch_model(make_model())
        routers = [module for module in model.modules() if hasattr(type(module), "count_choices")]
        weights = [router.weight.data for router in routers]
        for router in routers:
            router.weight.data = torch.empty(0)
        load = ExpertLoad(model, torch.device("cpu"))
        for router, weight in zip(routers, weights, strict=True):
            router.weight.data = weight
        self.assertEqual({len(router.expert_counts) for router in routers}, {routers[0].num_experts + 1})
        self.assertTrue(load)

    def test_a_dense_model(self):
        _, _, log = self.train(AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()))
        self.assertFalse(KEYS & set(log[0]))

    def test_nothing_remains(self):
        """Neither checkpoints nor the trained model have the counts. A copy made during training computes the same."""
        copies = []
        model = make_model()

        def hook(module, args, output):
            copies.append(copy.deepcopy(model.model))

        handle = model.lm_head.register_forward_hook(hook)
        trainer, _, _ = self.train(model, save_strategy="steps", save_steps=2, max_steps=2)
        handle.remove()
        (weights,) = Path(self.directory).glob("checkpoint-*/model.safetensors")
        make_model().save_pretrained(f"{self.directory}/new")
        self.assertEqual(set(load_file(weights)), set(load_file(f"{self.directory}/new/model.safetensors")))
        names = set(make_model().model.state_dict())
        self.assertEqual((set(trainer.model.model.state_dict()), set(copies[0].state_dict())), (names, names))
        self.assertFalse([name for name, _ in copies[0].named_buffers() if "expert" in name])
        routers = [layer.mlp.gate for layer in trainer.model.model.layers]
        self.assertEqual([router.expert_counts for router in routers], [None, None])
        batch = {"input_ids": torch.arange(1, 20)[None], "position_ids": torch.arange(19)[None], "use_cache": False}
        trainer.model.model.train()
        torch.testing.assert_close(copies[0](**batch)[0], trainer.model.model(**batch)[0])

    @pytest.mark.slow
    def test_a_second_run(self):
        trainer, counted, _ = self.train()
        counted.clear()
        said(trainer.train)
        self.check_log([entry for entry in trainer.state.log_history if "loss" in entry], counted)

    def test_rows_with_more_padding_and_several_forwards(self):
        """CUDA graphs run layers several times to warm up, and on longer rows than the model."""
        stock = make_model().train()
        model = use_cuda_graphs(patch_model(make_model()).train(), 64)
        graphs = model.model.layer_graphs
        load = ExpertLoad(model, torch.device("cpu"))
        # Recorded graphs would not count.
        self.assertIsNot(model.model.layer_graphs, graphs)
        self.assertEqual(model.model.layer_graphs.max_length, 64)
        lengths, counted = (20, 9), []
        for length in lengths:
            ids = torch.arange(1, length + 1)
            row = torch.cat([ids, torch.zeros(64 - length, dtype=torch.long)])[None]
            load.start(length)
            for _ in range(3):
                model(input_ids=row, cu_seqlens=torch.tensor([0, length, 64]), use_cache=False)
            load.add()
            counted.append(stock_counts(stock, ids))
        self.assertEqual(load._totals[0][:, :-1].tolist(), sum(counted).tolist())
        self.check(load.figures(), counted)
        self.assertEqual(load.figures(), {})

    @pytest.mark.slow
    def test_two_processes(self):
        _, saved = run_in_two_processes(self, "expert_load_run.py", f"{self.directory}/saved.pt")
        first, second = saved["counts"]
        self.check_log(saved["log"], [a + b for a, b in zip(first, second, strict=True)])
        # The ranks differ from their sum.
        share = [float((sum(x) / sum(x).sum(1, keepdim=True)).max()) * NUMBER for x in (first[:4], second[:4])]
        self.assertNotAlmostEqual(saved["log"][0]["expert_load_max"], share[0], delta=1e-3)
        self.assertNotAlmostEqual(saved["log"][0]["expert_load_max"], share[1], delta=1e-3)
