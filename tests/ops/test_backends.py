"""The selection of other packages' kernels. The tests in tests/gpu check their results."""

import sys
import unittest
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.device_boundaries import DeviceBoundaries
from transformers_packed.ops import backends
from transformers_packed.ops.backends import causal_conv1d, fla, flash_qla


BFLOAT16 = torch.bfloat16


def on_gpu(*shape, dtype=BFLOAT16, requires_grad=True):
    """The attributes of a CUDA tensor that verifiers read."""
    return SimpleNamespace(
        is_cuda=True, device="cuda:0", shape=torch.Size(shape), dtype=dtype, requires_grad=requires_grad
    )


def rule_call(dim=128, value_dim=128, dtype=BFLOAT16, value_dtype=None, requires_grad=True):
    heads = [on_gpu(1, 9, 2, dim, dtype=dtype, requires_grad=requires_grad) for _ in range(2)]
    value = on_gpu(1, 9, 4, value_dim, dtype=value_dtype or dtype, requires_grad=requires_grad)
    gates = [on_gpu(1, 9, 4, dtype=torch.float32, requires_grad=requires_grad) for _ in range(2)]
    return [*heads, value, *gates]


def conv_call(channels=16, width=4, activation="silu", dtype=BFLOAT16):
    return [on_gpu(1, 9, channels, dtype=dtype), on_gpu(channels, width, dtype=dtype), None, activation]


class KernelVerifiersTest(unittest.TestCase):
    def setUp(self):
        # As on a Hopper GPU with everything installed.
        for target, name, value in (
            (fla, "importable", lambda module, package: ""),
            (causal_conv1d, "importable", lambda module, package: ""),
            (flash_qla, "_problem", lambda: ""),
            (fla, "_backward_problem", lambda: ""),
            (fla, "_row_problem", lambda: ""),
            (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        ):
            self.enterContext(mock.patch.object(target, name, value))

    def refused(self, verify, call, pattern, **options):
        self.assertRegex(verify(*call, **options), pattern)

    def test_all_serve_what_they_are_made_for(self):
        boundaries = SequenceBoundaries.from_lengths([4, 5])
        for verify, call in (
            (flash_qla.verify_gated_delta_rule, rule_call()),
            (fla.verify_gated_delta_rule, rule_call()),
            (fla.verify_gated_delta_rule, rule_call(dim=64, value_dim=256)),
            (fla.verify_kimi_delta_rule, rule_call()),
            (fla.verify_kimi_delta_rule, rule_call(dim=64, value_dim=256)),
            (fla.verify_causal_conv1d, conv_call(dtype=torch.float32)),
            (causal_conv1d.verify_causal_conv1d, conv_call()),
            (causal_conv1d.verify_causal_conv1d, conv_call(activation=None)),
        ):
            self.assertEqual(verify(*call, boundaries=boundaries), "")
        in_graph = DeviceBoundaries(boundaries.cu_seqlens, length=9, advice="Pass lengths.")
        for verify in (fla.verify_gated_delta_rule, fla.verify_kimi_delta_rule):
            self.assertEqual(verify(*rule_call(), boundaries=in_graph), "")

    def test_rows_of_an_older_release(self):
        boundaries = SequenceBoundaries.from_lengths([4, 5])
        with mock.patch.object(fla, "_row_problem", lambda: "needs another release for packed rows"):
            self.assertEqual(fla.verify_kimi_delta_rule(*rule_call()), "")
            self.refused(fla.verify_kimi_delta_rule, rule_call(), "another release", boundaries=boundaries)

    def test_tensors_on_a_cpu(self):
        row = torch.zeros(1, 9, 2, 128)
        for verify, call in (
            (flash_qla.verify_gated_delta_rule, [row] * 5),
            (fla.verify_gated_delta_rule, [row] * 5),
            (fla.verify_kimi_delta_rule, [row] * 5),
            (fla.verify_causal_conv1d, [row[0], row[0, 0], None, "silu"]),
            (causal_conv1d.verify_causal_conv1d, [row[0], row[0, 0], None, "silu"]),
        ):
            self.refused(verify, call, "^needs CUDA tensors$")

    @parameterized.expand([("float32", torch.float32), ("float64", torch.float64)])
    def test_types(self, _, dtype):
        rules = flash_qla.verify_gated_delta_rule, fla.verify_gated_delta_rule, fla.verify_kimi_delta_rule
        for verify in rules:
            self.refused(verify, rule_call(dtype=dtype), f"not {dtype}")
        for verify in (fla.verify_causal_conv1d, causal_conv1d.verify_causal_conv1d):
            self.refused(verify, conv_call(dtype=torch.float64), "float64")
        mixed = rule_call(value_dtype=torch.float16)
        self.refused(flash_qla.verify_gated_delta_rule, mixed, "in float16 or in bfloat16")

    def test_shapes(self):
        self.refused(flash_qla.verify_gated_delta_rule, rule_call(dim=64), "128, not 64 and 128")
        self.refused(flash_qla.verify_gated_delta_rule, rule_call(value_dim=256), "128, not 128 and 256")
        self.refused(fla.verify_gated_delta_rule, rule_call(dim=512), "up to 256, not 512 and 128")
        self.refused(fla.verify_kimi_delta_rule, rule_call(dim=512), "up to 256, not 512 and 128")
        self.refused(fla.verify_kimi_delta_rule, rule_call(), "lower bounds from -5, not -6", lower_bound=-6.0)
        self.refused(causal_conv1d.verify_causal_conv1d, conv_call(channels=12), "not 12 and 4")
        self.refused(causal_conv1d.verify_causal_conv1d, conv_call(width=5), "not 16 and 5")

    def test_activations(self):
        for verify in (fla.verify_causal_conv1d, causal_conv1d.verify_causal_conv1d):
            self.refused(verify, conv_call(activation="gelu"), "silu and swish, not gelu")

    @parameterized.expand(
        [
            ("as_in_0.1.3", lambda offsets, indices: (64, offsets, 3, indices), True),
            ("without_a_total", lambda offsets, indices: (64, offsets, indices), False),
            ("another_chunk_size", lambda offsets, indices: (32, offsets, 3, indices), False),
            ("lengths_in_place_of_offsets", lambda offsets, indices: (64, offsets.diff(), 3, indices), False),
            ("under_another_name", None, False),
        ]
    )
    def test_flash_qla_in_graphs_needs_the_metadata_of_a_known_release(self, _, layout, known):
        def prepare_varlen_metadata(cu_seqlens, host):
            # The documents of 65 and 5 tokens have two chunks and one.
            offsets, indices = torch.tensor([0, 2, 3]), torch.tensor([[0, 0], [0, 1], [1, 0]])
            if layout is not None:
                cu_seqlens._flash_qla_prepared_varlen = layout(offsets, indices)
            return cu_seqlens

        index = ModuleType("flash_qla.utils.index")
        index.prepare_varlen_metadata = prepare_varlen_metadata
        flash_qla._knows_metadata.cache_clear()
        self.addCleanup(flash_qla._knows_metadata.cache_clear)
        cu_seqlens = torch.tensor([0, 4, 9, 9], dtype=torch.int32)
        in_graph = DeviceBoundaries(cu_seqlens, length=9, advice="Pass lengths.")
        modules = {name: ModuleType(name) for name in ("flash_qla", "flash_qla.utils")} | {index.__name__: index}
        with mock.patch.dict(sys.modules, modules):
            self.assertEqual(flash_qla.verify_gated_delta_rule(*rule_call(), boundaries=in_graph) == "", known)
            whole = SequenceBoundaries.from_lengths([4, 5])
            self.assertEqual(flash_qla.verify_gated_delta_rule(*rule_call(), boundaries=whole), "")

    def test_flash_qla_leaves_states_and_other_gpus_to_the_others(self):
        verify = flash_qla.verify_gated_delta_rule
        self.refused(verify, rule_call(), "only for packed rows", output_final_state=True)
        self.refused(verify, rule_call(), "only for packed rows", initial_state=on_gpu(1, 4, 128, 128))
        with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)):
            self.refused(verify, rule_call(), "compute capability")

    def test_a_backward_that_would_be_wrong(self):
        verify = fla.verify_gated_delta_rule
        with mock.patch.object(fla, "_backward_problem", lambda: "computes a wrong backward"):
            self.refused(verify, rule_call(), "computes a wrong backward")
            self.refused(verify, rule_call(requires_grad=False), "wrong", initial_state=on_gpu(1, 4, 128, 128))
            self.assertEqual(verify(*rule_call(requires_grad=False)), "")
            with torch.no_grad():
                self.assertEqual(verify(*rule_call()), "")

    def test_missing_packages(self):
        missing = {"importable": lambda module, package: f"no {package}"}
        with mock.patch.multiple(fla, **missing), mock.patch.multiple(causal_conv1d, **missing):
            self.refused(fla.verify_gated_delta_rule, rule_call(), "^no flash-linear-attention$")
            self.refused(fla.verify_causal_conv1d, conv_call(), "^no flash-linear-attention$")
            self.refused(causal_conv1d.verify_causal_conv1d, conv_call(), "^no causal-conv1d$")


class InstalledTest(unittest.TestCase):
    """The lookups that are cached."""

    def setUp(self):
        for function in (backends.importable, flash_qla._problem):
            function.cache_clear()
            self.addCleanup(function.cache_clear)

    def test_importable(self):
        self.assertEqual(backends.importable("json", "json"), "")
        self.assertEqual(backends.importable("no_such", "no-such"), "is not installed (pip install no-such)")

    def test_flash_qla(self):
        with mock.patch.dict(sys.modules, {"flash_qla": None}):
            self.assertRegex(flash_qla._problem(), "^cannot be imported: .*pip install flash-qla")
        flash_qla._problem.cache_clear()
        with mock.patch.dict(sys.modules, {"flash_qla": mock.Mock()}):
            with mock.patch.object(flash_qla.shutil, "which", return_value=None):
                self.assertRegex(flash_qla._problem(), "^needs nvcc")
            flash_qla._problem.cache_clear()
            with mock.patch.object(flash_qla.shutil, "which", return_value="/usr/bin/nvcc"):
                self.assertEqual(flash_qla._problem(), "")


class ChunkIndicesTest(unittest.TestCase):
    @parameterized.expand([([1],), ([64],), ([65, 64, 63],), ([5, 1, 200, 7],), ([1] * 70,)])
    def test_against_the_definition(self, lengths):
        indices = backends.chunk_indices(SequenceBoundaries.from_lengths(lengths))
        expected = [[n, chunk] for n, length in enumerate(lengths) for chunk in range(-(-length // 64))]
        self.assertEqual(indices.tolist(), expected)
        self.assertEqual(indices.dtype, torch.int32)

    def test_never_reads_the_device(self):
        # A meta tensor has no contents, so any read of values fails, including a host sync.
        boundaries = SequenceBoundaries.from_lengths([65, 1], device="meta")
        self.assertEqual(backends.chunk_indices(boundaries).shape, (3, 2))
        first = fla._boundaries(boundaries)
        self.assertIs(fla._boundaries(boundaries)["chunk_indices"], first["chunk_indices"])
