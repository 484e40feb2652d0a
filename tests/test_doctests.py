import doctest
import importlib
import pkgutil
import unittest

import transformers_packed


def modules():
    yield transformers_packed
    for info in pkgutil.walk_packages(transformers_packed.__path__, f"{transformers_packed.__name__}."):
        # The code of a modular file is in its modeling file. Importing both would register its classes twice.
        # An integration imports its framework, which only its own environment has, and `auto` registers our classes.
        if ".modular_" not in info.name and ".integrations." not in info.name and not info.name.endswith(".auto"):
            yield importlib.import_module(info.name)


class DoctestsTest(unittest.TestCase):
    def test_examples_in_docstrings(self):
        attempted = {}
        for module in modules():
            result = doctest.testmod(module)
            with self.subTest(module=module.__name__):
                self.assertEqual(result.failed, 0, "see the report above")
            attempted[module.__name__.removeprefix("transformers_packed.")] = result.attempted
        # A misspelled fence or prompt would silently exclude examples.
        for name in (
            "audit.audit",
            "boundaries",
            "data.collator",
            "data.planning.cost",
            "data.planning.planner",
            "errors",
            "models.registry",
            "ops.convolution",
            "ops.cross_entropy",
            "ops.glu",
            "ops.logps",
            "ops.norm",
            "ops.per_document",
            "ops.rotary",
            "training.losses",
        ):
            self.assertGreater(attempted[name], 0, f"no example of {name} ran")
        self.assertGreater(sum(attempted.values()), 20)
