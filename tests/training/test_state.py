"""Whatever users keep in Python is as if the check before the first step had not run."""

import functools
import itertools
import logging
import random
import threading
import unittest
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from common.late_copies import on_a_cpu
from mixins.configure import ConfigureTestCase, train_configured
from parameterized import parameterized
from scripts import configured_arms
from scripts.trainer_arms import CONFIGS, OPTIONS, Samples
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from transformers_packed.ops.offload import HostCheckpoints
from transformers_packed.training.state import same_state


CALLS = [0]
COUNT = 0


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


@dataclass
class Record:
    calls: int = 0
    history: list = field(default_factory=list)


class Cyclic:
    def __init__(self):
        self.itself, self.calls = self, 0


class OnClass:
    calls, history = 0, []


class Named(dict):
    """A container with attributes."""

    def __init__(self):
        super().__init__(calls=0)
        self.total = 0


def count_global():
    global COUNT
    COUNT += 1
    CALLS[0] += 1
    return COUNT, CALLS[0]


def count_in_module():
    configured_arms.calls = getattr(configured_arms, "calls", 0) + 1
    return configured_arms.calls


def closure():
    calls, history = 0, []

    def step():
        nonlocal calls
        calls += 1
        history.append(calls)
        return calls, tuple(history)

    return step


def add(name):
    return lambda x: setattr(x, name, getattr(x, name) + 1)


# A value, and a function that changes it in place and returns its content. Each is made anew for a run.
STATES = {
    "list": lambda: ([], lambda x: (x.append(len(x)), tuple(x))),
    "dict": lambda: ({}, lambda x: (x.update({len(x): 1}), tuple(x.items()))),
    "order_of_dict": lambda: (OrderedDict(a=1, b=2), lambda x: (x.move_to_end(next(iter(x))), tuple(x))),
    "default_dict": lambda: (defaultdict(int), lambda x: (x.__setitem__("a", x["a"] + 1), x["a"])),
    "counter": lambda: (Counter(), lambda x: (x.update("ab"), tuple(x.items()))),
    "deque": lambda: (deque(maxlen=3), lambda x: (x.append(random.random()), tuple(x))),
    "set": lambda: (set(), lambda x: (x.add(len(x)), frozenset(x))),
    "bytearray": lambda: (bytearray(), lambda x: (x.append(1), bytes(x))),
    "nested": lambda: (
        {"a": [deque(), ({"b": 0},)]},
        lambda x: (x["a"][1][0].update(b=x["a"][1][0]["b"] + 1), str(x)),
    ),
    "array": lambda: (np.zeros(3), lambda x: (x.__iadd__(1), x.tolist())),
    "array_of_objects": lambda: (np.array([[0], None], dtype=object), lambda x: (x[0].append(1), str(x))),
    "tensor": lambda: (torch.zeros(3), lambda x: (x.add_(1), x.tolist())),
    "grown_tensor": lambda: (torch.zeros(3), lambda x: (x.resize_(len(x) + 1).fill_(1), x.tolist())),
    "module": lambda: (torch.nn.BatchNorm1d(2), lambda x: (x(torch.rand(4, 2)), x.running_mean.tolist())),
    "object": lambda: (Record(), lambda x: (add("calls")(x), x.history.append(x.calls), str(x))),
    "namespace": lambda: (SimpleNamespace(calls=0), lambda x: (add("calls")(x), x.calls)),
    "slots": lambda: (Slots(), lambda x: (add("calls")(x), x.calls)),
    "cycle": lambda: (Cyclic(), lambda x: (add("calls")(x), x.calls)),
    "class": lambda: (OnClass, lambda x: (add("calls")(x), x.history.append(1), (x.calls, len(x.history)))),
    "container_with_attributes": lambda: (
        Named(),
        lambda x: (add("total")(x), x.update(calls=x.total), (x.total, str(x))),
    ),
    "generator_of_torch": lambda: (torch.Generator().manual_seed(1), lambda x: (torch.rand(2, generator=x).tolist(),)),
    "generator_of_numpy": lambda: (np.random.default_rng(1), lambda x: (x.random(),)),
    "random_state_of_numpy": lambda: (np.random.RandomState(1), lambda x: (x.rand(),)),
    "random": lambda: (random.Random(1), lambda x: (x.random(),)),
    "closure": lambda: (closure(), lambda x: (x(),)),
    "partial": lambda: (functools.partial(lambda x: x.append(1) or len(x), []), lambda x: (x(),)),
    "variable_of_a_module": lambda: (count_in_module, lambda x: (x(),)),
    "global": lambda: (count_global, lambda x: (x(),)),
    "beside_an_alias": lambda: ([list[int]], lambda x: (x.append(1), len(x))),
}


class StateTest(unittest.TestCase):
    @parameterized.expand(sorted(STATES))
    def test_a_value(self, kind):
        """In place, so that everyone who refers to it sees it."""
        value, use = STATES[kind]()
        use(value)
        before = random.getstate(), torch.get_rng_state()
        with same_state(SimpleNamespace(value=value)) as state:
            first = use(value)[-1]
            use(value)
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        self.assertEqual(str(use(value)[-1]), str(first))
        self.assertEqual(state.left, [])

    def test_attributes(self):
        """New ones go, and those that are gone or replaced are there again."""
        held = SimpleNamespace(kept=1, gone=[], replaced={})
        before = dict(vars(held))
        with same_state(held):
            held.new, held.replaced, held.kept = 1, {}, 2
            del held.gone
        self.assertEqual(vars(held), before)
        self.assertIs(held.replaced, before["replaced"])

    def test_a_gradient(self):
        """There is none meanwhile."""
        weight = torch.nn.Parameter(torch.ones(2))
        weight.sum().backward()
        gradient = weight.grad
        with same_state(SimpleNamespace(weight=weight)):
            self.assertIsNone(weight.grad)
            weight.sum().backward()
        self.assertIs(weight.grad, gradient)
        self.assertEqual(gradient.tolist(), [1, 1])

    def test_after_an_error(self):
        held = SimpleNamespace(calls=0)
        with self.assertRaises(KeyError), same_state(held):
            held.calls = 1
            raise KeyError
        self.assertEqual(held.calls, 0)

    def test_what_cannot_be_put_back(self):
        large = torch.zeros(2**24 + 1)
        held = SimpleNamespace(counter=itertools.count(), rows=(n for n in range(3)), large=large, other=large + 1)
        with same_state(held) as state:
            next(held.counter)
            held.large.add_(1)
        self.assertEqual(state.left, ["counter (count)", "rows (generator)", "large (64 MiB)"])

    def test_a_file(self):
        with open(__file__) as file:
            file.readline()
            with same_state(SimpleNamespace(file=file)) as state:
                second = file.readline()
            self.assertEqual((file.readline(), state.left), (second, []))

    def test_a_file_that_is_closed_meanwhile(self):
        """A dataset that went on to its next file keeps its place there. Everything else goes back."""
        held = SimpleNamespace(calls=0, shards=SimpleNamespace(at=0, file=open(__file__)))
        with same_state(held) as state:
            held.calls, held.shards.at = 1, 1
            held.shards.file.close()
            held.shards.file = open(__file__)
        with held.shards.file:
            self.assertEqual((held.calls, held.shards.at, held.shards.file.closed), (0, 1, False))
        self.assertEqual(state.left, ["shards (a file that was closed)"])

    def test_hooks_of_a_gradient(self):
        weight, calls = torch.nn.Parameter(torch.ones(2)), []
        weight.register_post_accumulate_grad_hook(lambda _: calls.append("earlier"))
        with same_state(SimpleNamespace(weight=weight)):
            weight.register_post_accumulate_grad_hook(lambda _: calls.append("meanwhile"))
            weight.register_hook(lambda _: calls.append("meanwhile"))
        weight.sum().backward()
        self.assertEqual(calls, ["earlier"])

    def test_values_of_models_are_not_copied(self):
        """They do not change in a step, and another copy may not fit. Their gradients do."""
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        parameters = list(model.parameters())
        with mock.patch.object(torch.Tensor, "clone", side_effect=AssertionError):
            with same_state(SimpleNamespace(teacher=model), kept=model.buffers()):
                parameters[0].grad = torch.ones_like(parameters[0])
        self.assertIsNone(parameters[0].grad)

    def test_buffers_of_checkpoints_stay(self):
        """They are neither copied nor put back: pinned pages must not be forgotten."""
        host = HostCheckpoints()
        run = functools.partial(host, functools.partial(checkpoint, use_reentrant=False), torch.sin)
        with on_a_cpu(4):
            for number in range(2):
                with same_state(SimpleNamespace(function=run)) as state:
                    run(torch.ones(8 << number, requires_grad=True)).sum().backward()
                (copies,) = host._copies.values()
                self.assertEqual((state.left, [x.nbytes for x in copies.free]), ([], [1 << 16]))
                self.assertEqual(copies.bytes, 1 << 16)

    def test_other_libraries_are_left_alone(self):
        held = SimpleNamespace(lock=threading.Event(), logger=logging.getLogger("state"))
        with same_state(held):
            held.lock.set()
            held.logger.setLevel(50)
        self.assertTrue(held.lock.is_set())
        self.assertEqual(held.logger.level, 50)


class Drawing(torch.utils.data.Dataset):
    """Draws and counts with each sample."""

    def __init__(self):
        self.rows, self.calls = Samples(12).rows, 0
        self.generator = torch.Generator().manual_seed(0)
        self.random, self.numpy = random.Random(0), np.random.default_rng(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.calls += 1
        shift = (
            int(torch.randint(1, 9, (), generator=self.generator)) + self.random.randrange(9) + self.numpy.integers(9)
        )
        ids = [1 + (token + int(shift)) % 60 for token in self.rows[index]["input_ids"]]
        return {"input_ids": ids, "labels": ids}


class OwnTrainer(Trainer):
    """Its loss depends on what it keeps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight, self.read = torch.nn.Parameter(torch.tensor(0.5)), []

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self.read.append((len(self.read), count_global(), count_in_module()))
        return loss * self.weight

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        with torch.no_grad():
            self.weight -= 0.01 * self.weight.grad
        return loss


class Counting(TrainerCallback):
    def __init__(self):
        self.calls, self.step = 0, closure()

    def hook(self, module, inputs, output):
        module.calls = getattr(module, "calls", 0) + 1
        self.calls += 1
        return output * (1 + 1e-4 * self.calls + 1e-4 * module.calls + 1e-4 * self.step()[0])


class TracesTest(ConfigureTestCase):
    def trained(self, verify):
        global COUNT
        COUNT, CALLS[:], configured_arms.calls = 0, [0], 0
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        args = TrainingArguments(self.directory, **{**OPTIONS, "per_device_train_batch_size": 3, "max_steps": 3})
        trainer = OwnTrainer(AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()), args, train_dataset=Drawing())
        counting = Counting()
        trainer.add_callback(counting)
        trainer.model.model.layers[0].mlp.register_forward_hook(counting.hook)
        line = train_configured(trainer, "padding_free", verify=verify)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        counts = trainer.train_dataset.calls, counting.calls, trainer.model.model.layers[0].mlp.calls
        weights = [x.detach().clone() for x in trainer.model.parameters()]
        return line, (losses, trainer.weight.item(), trainer.read, counts, counting.step()), weights

    def test_training_is_as_without_the_check(self):
        line, figures, weights = self.trained(True)
        self.assertIn("Verified packing on 3 documents", line)
        self.assertNotIn("not put back", line)
        other_line, other_figures, other_weights = self.trained(False)
        self.assertNotIn("erified", other_line)
        self.assertEqual(figures, other_figures)
        torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)

    def test_what_cannot_be_put_back_is_named(self):
        trainer = self.trainer()
        trainer.counter = itertools.count()
        self.assertRegex(train_configured(trainer), r"Verified packing on .*; not put back: counter \(count\)")

    def test_samples_that_are_gone_once_they_are_read_are_not_read(self):
        dataset = Samples(12)
        dataset.source = itertools.cycle(dataset.rows)
        trainer = self.trainer(dataset=dataset)
        line = train_configured(trainer)
        self.assertIn("Not verified: reading samples would consume dataset.source (cycle).", line)
