"""Public methods of our classes have the parameters and results of the newest Transformers, in the same order."""

import inspect
import types
import unittest
from unittest import mock

import torch
from common.families import tiny_model
from parameterized import parameterized

from transformers_packed import patch_model
from transformers_packed.boundaries import PACKING_KEYWORDS
from transformers_packed.models import inputs
from transformers_packed.models.families import FAMILIES, OWN, modeling_module
from transformers_packed.models.generic import announce
from transformers_packed.models.inputs import named_arguments
from transformers_packed.models.replacements import REPLACEMENTS
from transformers_packed.models.versions import CACHES, supports_other_families, takes_cache


# Two classes of each kind that a table generates.
BY_TABLE = ("bamba", "mamba2", "inkling", "recurrent_gemma") if supports_other_families() else ()
# Our arguments that the stock method does not have. They come last.
ADDED = {
    "GatedDeltaNet.forward": ["seq_idx", "cu_seqlens"],
    "RMSNorm.forward": ["residual", "stream"],
    "Qwen3_5ForSequenceClassification.forward": ["labels", "use_cache"],
}


def methods():
    for family in OWN:
        modeling_module(family.name)
    for name in BY_TABLE:
        announce(FAMILIES[name])
    for builtin, ours in REPLACEMENTS.items():
        for name, method in vars(ours).items():
            original = getattr(builtin, name, None)
            if not name.startswith("_") and isinstance(method, types.FunctionType) and inspect.isfunction(original):
                yield f"{builtin.__name__}.{name}", original, method, ours.__module__


def named(method) -> list[tuple]:
    """Return name, kind and default of every parameter except `**kwargs`."""
    parameters = inspect.signature(method).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]


class SignaturesTest(unittest.TestCase):
    @parameterized.expand(methods())
    def test_signature(self, name, builtin, ours, module):
        theirs, own = named(builtin), named(ours)
        self.assertEqual(own[: len(theirs)], theirs)
        added = [parameter for parameter, *_ in own[len(theirs) :]]
        if module.startswith("transformers_packed.models.qwen"):
            expected = next((names for end, names in ADDED.items() if name.endswith(end)), [])
            self.assertEqual(added, expected)
        self.assertTrue(all(default is None for *_, default in own[len(theirs) :]))


class ArgumentsTest(unittest.TestCase):
    def test_a_call_is_settled_once_and_layers_get_boundaries_alone(self):
        model, got = patch_model(tiny_model("qwen3_5_text")), []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _, args, kwargs: got.append(kwargs), with_kwargs=True)
        ids, mask = torch.arange(5, 11)[None], torch.ones(1, 6, dtype=torch.long)
        with mock.patch.object(inputs, "tokens_of", wraps=inputs.tokens_of) as settle:
            model(input_ids=ids, cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32))
            self.assertEqual(settle.call_count, 1)
            model(input_ids=ids, attention_mask=mask, use_cache=False, packs_padding=False)
            self.assertEqual(settle.call_count, 2)
        packed, padded = got[: len(model.model.layers)], got[len(model.model.layers) :]
        for kwargs, names in ((packed, {"boundaries"}), (padded, set())):
            for given in kwargs:
                self.assertEqual(given.keys() & {*PACKING_KEYWORDS, "boundaries", "settled"}, names)

    def test_all_names_of_the_cache(self):
        @takes_cache("past_key_values")
        def forward(self, cache=None):
            return cache

        self.assertEqual([*inspect.signature(forward).parameters], ["self", "past_key_values"])
        self.assertEqual([forward(0, 1), *(forward(0, **{name: 1}) for name in CACHES[:3])], [1] * 4)
        with self.assertRaisesRegex(TypeError, "both cache and cache_params"):
            forward(0, cache=1, cache_params=1)

    def test_named_arguments(self):
        self.assertEqual(named_arguments(["a", "b"], (1,), {"c": 2}), {"a": 1, "c": 2})
        with self.assertRaisesRegex(TypeError, "two values for a"):
            named_arguments(["a", "b"], (1,), {"a": 2})
        with self.assertRaisesRegex(TypeError, "got 3 arguments"):
            named_arguments(["a", "b"], (1, 2, 3), {})
