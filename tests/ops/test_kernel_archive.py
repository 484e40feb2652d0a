"""Archives of compiled kernels: found again in another directory, refused on another machine."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from parameterized import parameterized

from transformers_packed.ops import kernel_archive
from transformers_packed.ops.kernel_archive import export_kernels, import_kernels, machine


KERNEL = Path(__file__).parents[1] / "scripts" / "triton_kernel.py"


class ArchiveTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.file = self.folder / "kernels.tar.gz"

    def use(self, name):
        """Let the caches of both packages be in a directory."""
        roots = {package: (str(self.folder / name / package), "") for package in ("triton", "tilelang")}
        self.enterContext(mock.patch.object(kernel_archive, "caches", lambda: roots))
        return self.folder / name

    def write(self, path, content=b"code"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def files(self, root):
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def test_all_kernels_of_both_packages(self):
        here = self.use("here")
        self.write(here / "triton" / "A" / "norm.cubin")
        self.write(here / "triton" / "A" / "norm.ptx")
        index = {"child_paths": {name: str(here / "triton" / "A" / name) for name in ("norm.cubin", "norm.ptx")}}
        self.write(here / "triton" / "A" / "__grp__norm.json", json.dumps(index).encode())
        self.write(here / "tilelang" / "0.1" / "kernels" / "B" / "kernel_lib.so", b"library")
        # Those of other processes, which are not finished.
        self.write(here / "triton" / "A" / "tmp.pid_1_2" / "norm.cubin", b"half")
        self.write(here / "tilelang" / ".staging" / "C" / "kernel_lib.so", b"half")
        self.assertEqual(export_kernels(self.file), 2)
        there = self.use("there")
        self.assertEqual(import_kernels(self.file), (2, 0))
        found = self.files(there)
        index = json.loads(found.pop("triton/A/__grp__norm.json"))
        self.assertEqual(index, {"child_paths": {"norm.cubin": str(there / "triton" / "A" / "norm.cubin")}})
        expected = {"triton/A/norm.cubin": b"code", "tilelang/0.1/kernels/B/kernel_lib.so": b"library"}
        self.assertEqual(found, expected)
        # A kernel that is there stays, and nothing else is left.
        self.write(there / "triton" / "A" / "norm.cubin", b"newer")
        self.assertEqual(import_kernels(self.file), (0, 2))
        self.assertEqual((there / "triton" / "A" / "norm.cubin").read_bytes(), b"newer")
        self.assertEqual([p.name for p in self.folder.rglob(".import-*")], [])
        # One without a file, or whose index lists files that are gone, is mended.
        (there / "triton" / "A" / "norm.cubin").unlink()
        self.assertEqual(import_kernels(self.file), (1, 1))
        moved = {"child_paths": {"norm.cubin": "/elsewhere/norm.cubin"}}
        self.write(there / "triton" / "A" / "__grp__norm.json", json.dumps(moved).encode())
        self.assertEqual(import_kernels(self.file), (1, 1))
        self.assertEqual(self.files(there), expected | {"triton/A/__grp__norm.json": json.dumps(index).encode()})

    def test_kernels_that_are_not_whole_are_left_out(self):
        here = self.use("here") / "triton"
        for name, index in (("A", None), ("B", b""), ("C", b'{"child_paths": ["x"]}'), ("D", b"[]")):
            self.write(here / name / "norm.cubin")
            if index is not None:
                self.write(here / name / "__grp__norm.json", index)
        self.write(here / "E" / "__grp__norm.json", b'{"child_paths": {"norm.cubin": "/elsewhere/norm.cubin"}}')
        # What has no index is written in one step.
        self.write(here / "F" / "launcher.so")
        self.assertEqual(export_kernels(self.file), 1)
        there = self.use("there")
        self.assertEqual(import_kernels(self.file), (1, 0))
        self.assertEqual(self.files(there), {"triton/F/launcher.so": b"code"})

    def test_a_damaged_file(self):
        self.write(self.use("here") / "triton" / "A" / "launcher.so", os.urandom(100_000))
        export_kernels(self.file)
        whole, there = self.file.read_bytes(), self.use("there")
        for damaged in (whole[:-5000], whole[:60_000] + bytes([whole[60_000] ^ 1]) + whole[60_001:], b"text", b""):
            self.file.write_bytes(damaged)
            with self.assertRaisesRegex(ValueError, "expected a file that warmup --export wrote, got "):
                import_kernels(self.file)
        self.assertEqual(self.files(there), {})

    def test_others_can_read_the_file(self):
        self.write(self.use("here") / "triton" / "A" / "launcher.so")
        export_kernels(self.file)
        there = self.use("there")
        import_kernels(self.file)
        mask = os.umask(0)
        os.umask(mask)
        modes = [path.stat().st_mode & 0o777 for path in (self.file, there / "triton" / "A")]
        self.assertEqual(modes, [0o666 & ~mask, 0o777 & ~mask])

    @parameterized.expand([("torch", "2.0.0"), ("GPU", "NVIDIA H100"), ("driver", "1.2")])
    def test_another_machine(self, what, theirs):
        self.write(self.use("here") / "triton" / "A" / "launcher.so")
        ours = machine() | {"GPU": "NVIDIA H200", "driver": "580.1"}
        with mock.patch.object(kernel_archive, "machine", lambda: ours | {what: theirs}):
            export_kernels(self.file)
        there = self.use("there")
        with mock.patch.object(kernel_archive, "machine", lambda: ours):
            expected = f"kernels for this machine, got those for {what} {theirs} (here {ours[what]})"
            with self.assertRaisesRegex(ValueError, re.escape(expected)):
                import_kernels(self.file)
        self.assertEqual(self.files(there), {})

    def test_without_a_gpu_the_packages_alone_are_compared(self):
        self.write(self.use("here") / "triton" / "A" / "launcher.so")
        ours = machine()
        with mock.patch.object(kernel_archive, "machine", lambda: ours | {"GPU": "NVIDIA H200", "driver": "580.1"}):
            export_kernels(self.file)
        self.use("there")
        self.assertEqual(import_kernels(self.file), (1, 0))

    @parameterized.expand(["../A/x.so", "/etc/x.so", "triton/../../x.so", "other/A/x.so", "triton/x.so", "triton"])
    def test_paths_outside_of_the_caches(self, name):
        there = self.use("there")
        with tarfile.open(self.file, "w:gz") as archive:
            kernel_archive._add(archive, "machine.json", json.dumps(machine()).encode())
            kernel_archive._add(archive, name, b"code")
        with self.assertRaisesRegex(ValueError, "expected a file that warmup --export wrote, got "):
            import_kernels(self.file)
        self.assertEqual(self.files(there), {})

    def test_an_export_that_fails_leaves_the_old_file(self):
        self.write(self.use("here") / "triton" / "A" / "launcher.so")
        self.file.write_bytes(b"old")
        with mock.patch.object(kernel_archive, "_complete_kernel", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, export_kernels, self.file)
        self.assertEqual(self.file.read_bytes(), b"old")
        self.assertEqual([p.name for p in self.folder.glob(".kernels*")], [])

    @unittest.skipUnless(find_spec("triton"), "needs triton")
    def test_triton_finds_its_kernel_in_another_directory(self):
        self.use("first")
        self.assertEqual([self.compile("first"), self.compile("first")], ["compiled", "loaded"])
        export_kernels(self.file)
        (self.folder / "first").rename(self.folder / "moved")
        # As a copy of the directory would be.
        self.assertEqual(self.compile("moved"), "compiled")
        self.use("second")
        import_kernels(self.file)
        self.assertEqual(self.compile("second"), "loaded")

    def compile(self, name):
        # The processes of `run_script` have imported Triton as an interpreter.
        environment = os.environ | {"TRITON_CACHE_DIR": str(self.folder / name / "triton"), "TRITON_INTERPRET": "0"}
        done = subprocess.run([sys.executable, KERNEL], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()
