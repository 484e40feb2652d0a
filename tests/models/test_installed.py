"""What this package changes in other libraries is there while a model needs it, and nothing differs afterwards."""

import contextlib
import copy
import gc
import io
import pickle
import sys
import tempfile
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock
from weakref import WeakSet

import torch
import transformers
from common.families import tiny_model
from mixins.patch import builtin_model
from parameterized import parameterized
from peft import LoraConfig, PeftModel, get_peft_model
from scripts.trainer_arms import TINY, Samples
from torch.nn.modules import module as torch_module
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Trainer, TrainingArguments
from transformers.integrations import moe
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from transformers_packed import configure_packing, patch_model, register, registered, unpatch_model, unregister
from transformers_packed.foreign import experts_of
from transformers_packed.models import installed
from transformers_packed.models.quantized_weights import ExpertsIn4bit


TABLES = installed.FOR_MODELS, installed.FOR_ADAPTERS, installed.REGISTERED
OTHERS = "transformers.", "peft.", "trl.", "fla."
MODULES = "transformers.models.qwen3", "transformers.models.lfm2", "peft.", "trl.trainer.utils", "fla.ops.kda"
# What Transformers itself keeps on a class when it is first asked.
CACHED = ("_cached_value", "_abc_impl")


def names_of(target):
    names = vars(target) if hasattr(target, "__dict__") and not isinstance(target, dict) else target
    return {name: value for name, value in dict(names).items() if not str(name).endswith(CACHED)}


def libraries():
    """All names that the tables touch in other libraries, and those of the classes and modules around them."""
    tables = [names_of(target) for table in TABLES for target, *_ in table.rows()]
    tables.append(names_of(torch_module._global_module_registration_hooks))
    places = [torch.nn.Module, transformers.PreTrainedModel, transformers.Trainer]
    for name, loaded in list(sys.modules.items()):
        if isinstance(loaded, type(sys)) and name.startswith(MODULES):
            classes = [x for x in vars(loaded).values() if isinstance(x, type) and x.__module__.startswith(OTHERS)]
            places += [loaded, *classes]
    return tables, {target: names_of(target) for target in places}, {str(key) for key in _CAN_RECORD_REGISTRY}


def is_ours(value):
    return str(getattr(value, "__module__", "")).startswith("transformers_packed")


def state_of(model):
    """The classes, attributes and parts of a model, and what its configurations say."""
    found = []
    for module in model.modules():
        own = {
            name: value if isinstance(value, bool | int | float | str) else id(value)
            for name, value in vars(module).items()
        }
        found.append((type(module), own, [(name, id(part)) for name, part in module._modules.items()]))
    config = model.config
    return found, config.to_dict(), experts_of(config)


def peft_model(family):
    return get_peft_model(builtin_model(family), LoraConfig(r=2, target_modules=["q_proj"]))


def trl_model():
    from trl.trainer.utils import add_fused_lm_head

    model = builtin_model()
    add_fused_lm_head(model)
    return model


MODELS = {
    "dense": builtin_model,
    "moe": lambda: builtin_model("qwen3_next"),
    "generic": lambda: tiny_model("lfm2"),
    "peft": lambda: peft_model("qwen3_5_moe"),
    "trl": trl_model,
}


class InstalledTest(unittest.TestCase):
    def setUp(self):
        # Models of other tests may be alive.
        unregister()
        for table in TABLES:
            table.uninstall()
        kept, installed._owners = installed._owners, WeakSet()
        self.addCleanup(self.restore, kept)

    def restore(self, kept):
        installed._owners = kept
        if kept:
            installed.hold(next(iter(kept)))

    def check_libraries(self, before):
        (tables, places, recorders), (tables_now, places_now, recorders_now) = before, libraries()
        for old, new in zip(tables, tables_now, strict=True):
            self.assertEqual(old.keys(), new.keys())
            for name in old:
                self.assertIs(new[name], old[name], name)
        for target, names in places.items():
            # Other libraries import some of their modules late.
            new = places_now[target]
            self.assertEqual([name for name in names if new.get(name, self) is not names[name]], [], target)
            self.assertEqual([name for name in new.keys() - names.keys() if is_ours(new[name])], [], target)
        # Transformers lists stock classes of which it creates models.
        self.assertLessEqual(recorders, recorders_now)
        self.assertFalse([name for name in recorders_now if "transformers_packed" in name])
        self.assertFalse(any(table.installed for table in TABLES))

    @parameterized.expand(MODELS)
    def test_patch_and_unpatch(self, name):
        if name == "trl" and not find_spec("trl"):
            self.skipTest("needs trl")
        model = MODELS[name]()
        # Modules that the first patch imports, and classes that Transformers completes on their first use.
        unpatch_model(patch_model(MODELS[name]()))
        before, state = libraries(), state_of(model)
        patch_model(model)
        self.assertIs(moe.ALL_EXPERTS_FUNCTIONS.get(installed.EXPERTS), installed.late("experts").experts_forward)
        self.assertEqual(PeftModel.save_pretrained.__wrapped__.__qualname__, "PeftModel.save_pretrained")
        # What users set on a packed model leaves with our class.
        inner = model.get_base_model() if name == "peft" else model
        inner.packs_padding = False
        del inner.packs_padding
        self.assertTrue(inner.packs_padding)
        inner.packs_padding = False
        self.assertNotEqual(state_of(model), state)
        self.assertIs(unpatch_model(model), model)
        self.check_libraries(before)
        for (found, own, parts), (cls, attributes, children) in zip(state_of(model)[0], state[0], strict=True):
            self.assertEqual((found, own, parts), (cls, attributes, children))
        self.assertEqual(state_of(model)[1:], state[1:])

    def test_copies_and_unpickled_models_count(self):
        before, model = libraries(), patch_model(builtin_model("qwen3_next"))
        for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
            other = duplicate(model)
            unpatch_model(model)
            self.assertTrue(installed.FOR_MODELS.installed)
            unpatch_model(other)
            self.check_libraries(before)
            patch_model(model)
        del model, other
        gc.collect()
        with registered():
            pass
        self.check_libraries(before)

    def test_an_unpickled_model_installs(self):
        model = patch_model(builtin_model("qwen3_next"))
        saved = pickle.dumps(model)
        unpatch_model(model)
        self.assertFalse(installed.FOR_MODELS.installed)
        pickle.loads(saved)(torch.arange(1, 9)[None])

    def test_registered(self):
        before = libraries()
        with registered():
            self.assertTrue(all(table.installed for table in TABLES))
            with registered():
                model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TINY))
            self.assertTrue(installed.is_registered())
        # A model of our class still needs its part.
        self.assertEqual([bool(table.installed) for table in TABLES], [True, True, False])
        self.assertFalse(modeling_auto.AutoModelForCausalLM._model_mapping._extra_content)
        self.assertIs(type(unpatch_model(model)), Qwen3_5ForCausalLM)
        self.check_libraries(before)
        ids = torch.arange(1, 9)[None]
        self.assertEqual(len(model(ids, output_hidden_states=True).hidden_states), 3)
        register()
        unregister()
        self.check_libraries(before)

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_quantized(self):
        before, stock = libraries(), AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
        folder = self.enterContext(tempfile.TemporaryDirectory())
        builtin_model("qwen3_next").save_pretrained(folder)
        config = transformers.BitsAndBytesConfig(load_in_4bit=True)
        with registered():
            model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        self.assertTrue(any(isinstance(weights, ExpertsIn4bit) for weights in model.parameters()))
        unpatch_model(model)
        self.check_libraries(before)
        self.assertIs(AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"], stock)
        # Our classes load so without a registration.
        ours = installed.late("qwen3_next.modeling_qwen3_next").Qwen3NextForCausalLM
        model = ours.from_pretrained(folder, quantization_config=config)
        self.assertTrue(any(isinstance(weights, ExpertsIn4bit) for weights in model.parameters()))
        unpatch_model(model)
        self.check_libraries(before)

    def test_packing_turned_off(self):
        """With a head of multi-token prediction and adapters."""
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1))
        options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
        args = TrainingArguments(self.enterContext(tempfile.TemporaryDirectory()), **options)
        trainer = Trainer(model, args, train_dataset=Samples(6))
        before, state = libraries(), state_of(model)
        with contextlib.redirect_stdout(io.StringIO()):
            configure_packing(trainer, "padding_free", mtp_loss_weight=0.5)
            self.assertIsNotNone(model.mtp)
            configure_packing(trainer, "off")
        self.check_libraries(before)
        self.assertEqual(state_of(model), state)

    def test_what_somebody_put_around_ours_stays(self):
        model = patch_model(builtin_model())
        ours = PeftModel.load_adapter
        theirs = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
        with mock.patch.object(PeftModel, "load_adapter", theirs):
            unpatch_model(model)
            self.assertIs(PeftModel.load_adapter, theirs)
            self.assertFalse(hasattr(PeftModel.save_pretrained, "__wrapped__"))
        PeftModel.load_adapter = ours.__wrapped__

    def test_a_release_of_peft_without_private_parts(self):
        public = dict.fromkeys(("save_pretrained", "load_adapter"), lambda self: None)
        peft = SimpleNamespace(PeftModel=type("PeftModel", (), dict(public)))
        with mock.patch.dict("sys.modules", {"peft.peft_model": peft}):
            installed.FOR_ADAPTERS.install()
            self.assertEqual([name for _, name, *_ in installed.FOR_ADAPTERS.installed], list(public))
            installed.FOR_ADAPTERS.uninstall()
        self.assertIs(peft.PeftModel.load_adapter, public["load_adapter"])
