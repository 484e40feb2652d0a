"""Run tests and reproductions of patches in a copy of Transformers, given on the command line. JSON in and out."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import unittest


# Stock classes use these packages whenever they can be imported. Without a GPU they crash.
for package in ("fla", "causal_conv1d", "mamba_ssm"):
    sys.modules[package] = None
# Replace the folder of this file, so that modules of this repository are not found.
sys.path[0] = sys.argv[1]

# Keep the output of tests out of the answers.
ANSWERS = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


class Outcomes(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.found = {}

    def _note(self, test, outcome):
        # The first failing subtest decides.
        self.found.setdefault(test.id(), outcome)

    def addSuccess(self, test):
        super().addSuccess(test)
        self._note(test, "passed")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._note(test, f"failed: {error[1]}"[:500])

    addError = addFailure

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._note(test, f"failed: {error[1]}"[:500])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, f"skipped: {reason}")


def run(name: str, test: str, reproduction: str) -> dict:
    spec = importlib.util.spec_from_file_location(f"test_{name.replace('-', '_')}", test)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    outcomes = Outcomes()
    try:
        spec.loader.exec_module(module)
        unittest.defaultTestLoader.loadTestsFromModule(module).run(outcomes)
    except ImportError as error:
        outcomes.found["import"] = f"failed: {error}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            exec(compile(reproduction, "reproduction", "exec"), {"__name__": "reproduction"})
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=printed)
    return {"tests": outcomes.found, "reproduction": printed.getvalue().strip() or "runs"}


if __name__ == "__main__":
    import transformers

    assert transformers.__file__.startswith(os.path.realpath(sys.argv[1])), transformers.__file__
    transformers.logging.set_verbosity_error()
    print(json.dumps({job[0]: run(*job) for job in json.load(sys.stdin)}), file=ANSWERS, flush=True)
