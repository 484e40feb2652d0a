"""The number of elements of parameters, as the same model has them in one piece."""

import copy
import unittest
from importlib import import_module
from importlib.util import find_spec

import torch
from mixins.lora import lora
from mixins.patch import builtin_model
from parameterized import parameterized
from peft import get_peft_model
from torch import distributed

from transformers_packed.models.parameters import num_elements, trained_share


class NumElementsTest(unittest.TestCase):
    def setUp(self):
        self.model = get_peft_model(builtin_model(), lora())
        self.sizes = [parameter.numel() for parameter in self.model.parameters()]
        trained = [size for size, x in zip(self.sizes, self.model.parameters(), strict=True) if x.requires_grad]
        self.share = sum(trained) / sum(self.sizes)

    def check(self, model):
        self.assertEqual([num_elements(parameter) for parameter in model.parameters()], self.sizes)
        self.assertEqual(trained_share(model), self.share)
        self.assertTrue(0 < self.share < 1)

    def test_a_plain_model(self):
        self.check(self.model)

    @parameterized.expand([("all", 0), ("large_ones", 1000)])
    def test_partitioned_by_zero_3(self, _, persistent):
        """DeepSpeed keeps small parameters whole. All have `ds_numel`."""
        for parameter in self.model.parameters():
            parameter.ds_numel = parameter.numel()
            if parameter.numel() > persistent:
                parameter.data = torch.empty(0)
        self.check(self.model)

    @unittest.skipUnless(distributed.is_available(), "needs torch.distributed")
    def test_sharded_by_fsdp2(self):
        # Earlier releases of PyTorch have this backend only after the import.
        import_module("torch.testing._internal.distributed.fake_pg")
        distributed.init_process_group("fake", store=distributed.HashStore(), rank=0, world_size=4)
        self.addCleanup(distributed.destroy_process_group)
        distributed.fsdp.fully_shard(self.model, mesh=distributed.init_device_mesh("cpu", (4,)))
        self.assertLess(next(self.model.parameters()).to_local().numel(), self.sizes[0])
        self.check(self.model)

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_in_4_bit(self):
        from bitsandbytes.nn import Linear4bit

        model = copy.deepcopy(self.model)
        layers = [x for x in model.modules() if type(x) is torch.nn.Linear and not x.weight.requires_grad]
        for layer in layers:
            four_bit = Linear4bit(layer.in_features, layer.out_features, bias=False)
            four_bit.weight.data = layer.weight.data
            layer.weight = four_bit.to("cpu").weight
        self.assertLess(layers[0].weight.numel(), layers[0].in_features * layers[0].out_features)
        self.check(model)
