"""Tensors that the backward computes again: when a recipe is known, and how long."""

import gc
from unittest import mock

import torch
from mixins.triton import InterpretedKernelsTest

from transformers_packed.ops import recipes, rms_norm
from transformers_packed.ops.recipes import recipe_of


class RecipesTest(InterpretedKernelsTest):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(recipes, "WORTH_RECOMPUTING", 8))
        self.x, self.weight = torch.randn(2, 4), torch.randn(4)

    def normed(self):
        return rms_norm(self.x, self.weight, impl="triton")

    def test_gives_the_same_numbers(self):
        y = self.normed()
        recompute, source, weight = recipe_of(y)
        self.assertTrue(torch.equal(recompute(source, weight), y))
        self.assertFalse(hasattr(y, "_recipe"))

    def test_none_after_a_change_and_for_other_tensors(self):
        y = self.normed()
        self.assertIsNone(recipe_of(y.clone())[0])
        y.mul_(2)
        self.assertEqual(recipe_of(y), (None, None, None))

    def test_none_for_a_short_tensor_and_without_gradients(self):
        self.x = self.x[:1]
        self.assertIsNone(recipe_of(self.normed())[0])
        self.x = torch.randn(2, 4)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                self.assertIsNone(recipe_of(self.normed())[0])

    def test_lives_as_long_as_the_tensor(self):
        y = self.normed()
        before = len(recipes._recipes)
        del y
        gc.collect()
        self.assertEqual(len(recipes._recipes), before - 1)
