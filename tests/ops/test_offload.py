"""Checkpoints in host memory: their buffers, and how models enable them. `tests/gpu` has the copies."""

import unittest
from functools import partial
from unittest import mock

import torch
from mixins.model import gradients, packed_batch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import patch_model, unpatch_model
from transformers_packed.models.releases import can_select_checkpoints
from transformers_packed.ops.offload import Pool, checkpoint_on_host


def allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


class PoolTest(unittest.TestCase):
    def test_buffers_are_used_again(self):
        pool = Pool(mock.Mock(side_effect=allocate))
        first, second = pool.take(10 << 20), pool.take(10 << 20)
        pool.free += [first, second]
        self.assertIn(pool.take((10 << 20) - 5).data_ptr(), (first.data_ptr(), second.data_ptr()))
        self.assertEqual((len(pool.free), pool.allocate.call_count), (1, 2))

    def test_the_smallest_that_fits(self):
        pool = Pool(allocate)
        sizes = [pool.take(size << 20) for size in (40, 20, 30)]
        pool.free += sizes
        self.assertIs(pool.take(15 << 20), sizes[1])
        self.assertIs(pool.take(21 << 20), sizes[2])

    def test_one_that_is_too_small_makes_room(self):
        """The number of buffers is never larger than the number of tensors that were saved at once."""
        pool = Pool(allocate)
        pool.free += [pool.take(1 << 20), pool.take(2 << 20)]
        large = pool.take(3 << 20)
        self.assertGreaterEqual(large.nbytes, 3 << 20)
        self.assertEqual([buffer.nbytes for buffer in pool.free], [1 << 20])

    def test_at_most_a_sixteenth_larger(self):
        for size in (1 << 20, (1 << 20) + 1, 1342177280, 999_999_999):
            asked = mock.Mock(side_effect=lambda size: torch.empty(size, dtype=torch.uint8, device="meta"))
            Pool(asked).take(size)
            self.assertTrue(size <= asked.call_args.args[0] <= size * 17 / 16, size)


@unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
class ModelTest(unittest.TestCase):
    def setUp(self):
        set_seed(0)
        config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
        self.model = patch_model(Qwen3_5ForCausalLM(config)).train()

    def functions(self, model=None):
        layers = (model or self.model).model.layers
        return [layer._gradient_checkpointing_func for layer in layers if layer.gradient_checkpointing]

    def test_the_options_of_transformers(self):
        batch = packed_batch([torch.arange(1, 6), torch.arange(1, 4)])
        expected = gradients(self.model, self.model(**batch).loss)
        for reentrant in (False, True):
            self.model.activation_checkpointing_enable({"use_reentrant": reentrant}, every_n_layers=2, offload=True)
            functions = self.functions()
            self.assertEqual([function.func for function in functions], [checkpoint_on_host] * 2)
            inner = functions[0].args[0]
            self.assertEqual((inner.func, inner.keywords), (checkpoint, {"use_reentrant": reentrant}))
            actual = gradients(self.model, self.model(**batch).loss)
            self.assertTrue(all(torch.equal(actual[name], expected[name]) for name in expected))
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.assertEqual([function.func for function in self.functions()], [checkpoint] * 4)

    def test_the_old_name(self):
        with self.assertWarns(FutureWarning):
            self.model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
        self.assertEqual([function.func for function in self.functions()], [checkpoint_on_host] * 4)

    def test_an_accelerator_without_these_copies(self):
        with mock.patch("torch.accelerator.current_accelerator", lambda: torch.device("xpu")):
            self.model.activation_checkpointing_enable(offload=True)
        self.assertNotIn(checkpoint_on_host, [getattr(function, "func", None) for function in self.functions()])

    def test_a_stock_model(self):
        unpatch_model(self.model).activation_checkpointing_enable(offload=True)
        self.assertNotIn(checkpoint_on_host, [function.func for function in self.functions()])

    def test_other_families(self):
        from transformers import FalconH1Config, FalconH1ForCausalLM

        tiny = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        tiny |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16}
        model = patch_model(FalconH1ForCausalLM(FalconH1Config(**tiny, num_attention_heads=2, num_key_value_heads=1)))
        model.train().activation_checkpointing_enable({"use_reentrant": False}, offload=True)
        self.assertEqual([function.func for function in self.functions(model)], [checkpoint_on_host])
        model(**packed_batch([torch.arange(1, 6), torch.arange(1, 4)])).loss.backward()

    def test_a_family_that_stays_stock(self):
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        model = patch_model(LlamaForCausalLM(config))
        model.activation_checkpointing_enable(offload=True)
        self.assertNotEqual(self.functions(model)[0].func, checkpoint_on_host)

    def test_small_tensors_stay(self):
        seen = []

        def function(x):
            seen.append(x)
            return (x * x).sum()

        x = torch.ones(3, requires_grad=True)
        checkpoint_on_host(partial(checkpoint, use_reentrant=False), function, x).backward()
        self.assertEqual((len(seen), x.grad.tolist()), (2, [2.0, 2.0, 2.0]))


if __name__ == "__main__":
    unittest.main()
