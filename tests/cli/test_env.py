import contextlib
import io
import os
import subprocess
import sys
import unittest
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest

from transformers_packed import cli
from transformers_packed.cli import env as environment


class EnvironmentTest(unittest.TestCase):
    def test_the_command(self):
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            self.assertEqual(cli.main(["env"]), 0)
        self.assertIn(f"torch {metadata.version('torch')}", stdout.getvalue())
        self.assertRegex(stdout.getvalue(), "\ndevices: .*cpu\n$")

    def test_gpus(self):
        properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
        with (
            mock.patch("torch.cuda.device_count", lambda: 1),
            mock.patch("torch.cuda.get_device_properties", lambda index: properties),
        ):
            text = environment.describe_environment()
        self.assertIn("devices: cuda:0 (NVIDIA H100, 80 GiB, compute capability 9.0), cpu", text)

    @pytest.mark.slow
    def test_nobody_reads_on(self):
        read, write = os.pipe()
        os.close(read)
        code = "import sys; from transformers_packed.cli import main; sys.exit(main())"
        run = [sys.executable, "-c", code, "doctor"]
        try:
            result = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, text=True)
        finally:
            os.close(write)
        self.assertEqual((result.returncode, result.stderr), (141, ""))

    def test_missing_packages_are_named(self):
        packages = {"kernels": ("torch", "no-such-package")}
        with mock.patch.object(environment, "PACKAGES", packages):
            self.assertIn("no-such-package missing", environment.describe_environment())
