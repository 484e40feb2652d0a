"""The fused ops of layers on a GPU, with the widths of released models: `make test-gpu`."""

import itertools
import statistics
import unittest
from functools import partial

import torch
from common.fused import CASES, HEAD_CASES, TAIL, boundaries_of, cast, errors, guarded_buffers, named
from common.gpu import compiled_kernels, needs_gpu, report, synchronising_is_an_error
from parameterized import parameterized
from torch.utils.checkpoint import checkpoint

from transformers_packed.ops import (
    causal_conv1d_qkv,
    gated_delta_gates,
    gated_rms_norm,
    glu,
    linear_cross_entropy,
    qk_norm_rope,
    rms_norm,
)
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, Projection


DEVICE = "cuda"
TOKENS = (1, 65, 1000, 65536)
MANY_TOKENS = 2**18
# The largest allowed error, and the error of a result's last bit. The latter applies if the reference is nearly exact,
# because twice its error would be too strict.
BARS = {torch.bfloat16: (1e-2, 3e-3), torch.float32: (1e-5, 2e-6)}
RELEASED = [(case, size) for case in (*CASES, *HEAD_CASES) for size in case.released]
ONE_SIZE = [(case, case.released[-1]) for case in (*CASES, *HEAD_CASES) if case.released]


def tokens_of(case):
    """The references of the heads cannot hold the logits of 65,536 tokens."""
    return TOKENS[:-1] if case in HEAD_CASES else TOKENS


@needs_gpu
class FusedTest(unittest.TestCase):
    def setUp(self):
        self.addCleanup(torch.cuda.empty_cache)

    @parameterized.expand(
        named((*case, tokens, dtype) for case in RELEASED for tokens in tokens_of(case[0]) for dtype in BARS)
    )
    def test_against_the_reference_in_float64(self, _, case, size, tokens, dtype):
        inputs = case.inputs(tokens, DEVICE, dtype, **size)
        expected = case.run("reference", cast(inputs, torch.float64))
        ours = errors(case.run(case.fused, inputs), expected)
        torchs = errors(case.run("reference", inputs), expected)
        report(f"{case.name} {size}, {tokens} tokens, {dtype}", **{case.fused: max(ours)}, torch=max(torchs))
        most, last_bit = BARS[dtype]
        for i, (a, b) in enumerate(zip(ours, torchs, strict=True)):
            self.assertLess(a, min(most, max(2 * b, last_bit)), f"result {i}: {a}, of torch {b}")

    @parameterized.expand(named((*case, dtype) for case in ONE_SIZE for dtype in BARS))
    def test_buffers_and_repetition(self, _, case, size, dtype):
        inputs = case.inputs(1000, DEVICE, dtype, **size)
        plain = case.run(case.fused, inputs)
        with guarded_buffers():
            guarded = case.run(case.fused, inputs)
        for results in (guarded, case.run(case.fused, inputs)):
            self.assertTrue(all(map(torch.equal, results, plain)))
        self.assertTrue(all(x.isfinite().all() for x in plain))

    @parameterized.expand(named((case, size) for case, size in ONE_SIZE if case not in HEAD_CASES))
    def test_no_tokens(self, _, case, size):
        *_, gradient = case.run(case.fused, case.inputs(0, DEVICE, **size))
        self.assertEqual(int(gradient.count_nonzero()), 0)

    @parameterized.expand(named(ONE_SIZE))
    def test_compiles_nothing_for_another_number_of_tokens(self, _, case, size):
        with compiled_kernels() as names:
            # No model uses float16 here, so the first run has to compile, and the hook records it. Adapters add no kernel.
            case.run(case.fused, case.inputs(1000, DEVICE, torch.float16, **size))
            if case.fused == "triton" and not case.name.endswith("_lora"):
                self.assertGreater(len(names), 0)
            names.clear()
            for tokens in (1, 2, 16, 65, 1024, 4097):
                case.run(case.fused, case.inputs(tokens, DEVICE, torch.float16, **size))
        self.assertEqual(names, [])

    @parameterized.expand(named(ONE_SIZE))
    def test_does_not_wait_for_the_gpu(self, _, case, size):
        case.run(case.fused, case.inputs(65, DEVICE, torch.bfloat16, **size))
        inputs = case.inputs(1000, DEVICE, torch.bfloat16, **size)
        boundaries_of(1000, inputs[0].device)
        leaves = case.leaves(inputs)
        outputs = case.outputs(case.fused, leaves)
        upstream = case.upstream(outputs)
        with synchronising_is_an_error():
            # The heads count their targets on the host.
            if case not in HEAD_CASES:
                outputs = case.outputs(case.fused, leaves)
            torch.autograd.backward(outputs, upstream)


@needs_gpu
class DropoutTest(unittest.TestCase):
    """Adapters with dropout whose matrices are identities return their inputs after dropout."""

    def setUp(self):
        eye = torch.eye(256, device=DEVICE)
        self.layers = [Projection(0 * eye, None, (Adapter(eye, eye, dropout=p),)) for p in (0.05, 0.5)]
        generator = torch.Generator(DEVICE).manual_seed(2)
        self.x = torch.randn(2, 500, 256, generator=generator, device=DEVICE).requires_grad_()

    def outputs(self, seed):
        torch.manual_seed(seed)
        return shared_input_linears(self.x, *self.layers, impl="fused")

    def test_masks(self):
        outputs = self.outputs(0)
        for y, again, other, layer in zip(outputs, self.outputs(0), self.outputs(1), self.layers, strict=True):
            p = layer.adapters[0].dropout
            factor = (y / self.x).detach()
            kept = factor != 0
            self.assertLess((factor[kept] * (1 - p) - 1).abs().max(), 1e-5)
            self.assertLess(abs(kept.double().mean() - (1 - p)), 5 * (p * (1 - p) / kept.numel()) ** 0.5)
            self.assertTrue(torch.equal(y, again))
            self.assertFalse(torch.equal(y, other))
            (gradient,) = torch.autograd.grad(y.sum(), self.x, retain_graph=True)
            self.assertLess((gradient - factor).abs().max(), 1e-5)
        zeros = [y == 0 for y in outputs]
        together = (zeros[0] & zeros[1]).double().mean()
        self.assertLess(abs(together - 0.05 * 0.5), 5 * (0.025 / zeros[0].numel()) ** 0.5)

    @parameterized.expand([("reentrant", True), ("not_reentrant", False)])
    def test_checkpointing_changes_nothing(self, _, use_reentrant):
        found = []
        plain = partial(shared_input_linears, impl="fused")
        for call in (plain, partial(checkpoint, plain, use_reentrant=use_reentrant)):
            torch.manual_seed(0)
            self.x.grad = None
            outputs = call(self.x, *self.layers)
            (outputs[0].sin().sum() + outputs[1].cos().sum()).backward()
            found.append([*outputs, self.x.grad])
        self.assertTrue(all(map(torch.equal, *found)))

    def test_does_not_wait_for_the_gpu(self):
        sum(y.sum() for y in self.outputs(0)).backward()
        with synchronising_is_an_error():
            sum(y.sum() for y in shared_input_linears(self.x, *self.layers, impl="fused")).backward()


def _convolved(x, weight):
    boundaries = boundaries_of(x.shape[1], x.device)
    return causal_conv1d_qkv(x, weight, key_heads=16, key_dim=128, value_dim=128, boundaries=boundaries, impl="triton")


# For each op: a call, the shapes of its inputs per token, and those of its parameters. Rows are so wide, or so far
# apart, that the last of 262,144 tokens lies beyond 2^31 elements.
LARGE = [
    ("rms_norm", lambda x, r, w: rms_norm(x, w, residual=r, impl="triton"), [(12288,)] * 2, [(12288,)]),
    ("gated_rms_norm", lambda *x: gated_rms_norm(*x, impl="triton"), [(72, 128)] * 2, [(128,)]),
    ("swiglu", lambda *x: glu(*x, impl="triton"), [(9728,)] * 2, []),
    ("sigmoid_gate", lambda *x: glu(*x, activation="sigmoid", impl="triton"), [(9728,)] * 2, []),
    ("convolution", _convolved, [(96 * 128,)], [(96 * 128, 4)]),
]


@needs_gpu
class LargeTest(unittest.TestCase):
    """The last tokens of a row of 262,144 tokens are whole documents and give the same result alone."""

    def setUp(self):
        torch.cuda.empty_cache()
        self.addCleanup(torch.cuda.empty_cache)

    def row(self, *shape):
        """Create bfloat16 inputs, random only in the last tokens for speed. Wrong offsets still show."""
        row = torch.zeros(1, MANY_TOKENS, *shape, dtype=torch.bfloat16, device=DEVICE)
        row[:, -TAIL:].normal_()
        return row

    def check(self, name, call, rows, parameters, constants=()):
        """Compare outputs and gradients in the last tokens of `rows` with those of these tokens alone."""
        self.assertGreater(MANY_TOKENS * rows[0].stride(1), 2**31)
        results = []
        for start in (0, -TAIL):
            leaves = [x[:, start:].detach().requires_grad_() for x in rows]
            outputs = call(*leaves, *parameters, *(x[:, start:] for x in constants))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            gradients = []
            for i, output in enumerate(outputs):
                gradient = torch.zeros_like(output)
                generator = torch.Generator(DEVICE).manual_seed(i)
                gradient[:, -TAIL:].normal_(generator=generator)
                gradients.append(gradient)
            torch.autograd.backward(outputs, gradients)
            results.append([*(x.detach()[:, -TAIL:] for x in outputs), *(x.grad[:, -TAIL:] for x in leaves)])
            del outputs, gradients, gradient, output, leaves
        error = max(errors(*results))
        report(f"{name}, {MANY_TOKENS} tokens {rows[0].stride(1)} elements apart", end_against_itself_alone=error)
        self.assertLess(error, 1e-3)

    @parameterized.expand(LARGE)
    def test_end_of_a_row(self, name, call, shapes, parameter_shapes):
        parameters = [torch.randn(shape, device=DEVICE).bfloat16() for shape in parameter_shapes]
        self.check(name, call, [self.row(*shape) for shape in shapes], parameters)

    def test_end_of_a_row_with_positions(self):
        weights = [torch.randn(256, device=DEVICE).bfloat16() for _ in range(2)]
        rows, angles = [self.row(36, 512), self.row(36, 256)], [self.row(64), self.row(64)]
        self.check("qk_norm_rope", partial(qk_norm_rope, impl="triton"), rows, weights, angles)

    def test_end_of_columns_of_a_wide_row(self):
        parameters = [torch.randn(32, device=DEVICE) for _ in range(2)]
        rows = [self.row(8448)[..., :32], self.row(32)]
        self.check("gated_delta_gates", partial(gated_delta_gates, impl="triton"), rows, parameters)

    def test_logits_of_a_chunk(self):
        tokens, hidden, vocab = 9216, 64, 248320
        generator = torch.Generator(DEVICE).manual_seed(0)
        randn = partial(torch.randn, generator=generator, device=DEVICE)
        rows, weight = randn(tokens, hidden).bfloat16(), randn(vocab, hidden).bfloat16() / 32
        labels = torch.randint(0, vocab, (tokens,), generator=generator, device=DEVICE)
        self.assertGreater(tokens * vocab, 2**31)
        results = []
        for chunk_size in (tokens, 64):
            leaf = rows.detach().requires_grad_()
            options = {"num_items_in_batch": 1, "chunk_size": chunk_size, "impl": "triton"}
            loss = linear_cross_entropy(leaf, weight, labels, **options)
            results.append([loss.detach(), *torch.autograd.grad(loss, leaf)])
        error = max(errors(*results))
        report(f"linear_cross_entropy, {tokens} tokens of {vocab} logits in a chunk", against_small_chunks=error)
        self.assertLess(error, 1e-3)

    def test_memory_of_a_short_row(self):
        """The logits of a chunk take no more than the gradient of the weight in backward. The report has times, too."""
        tokens, hidden, vocab = 4096, 1024, 248320
        generator = torch.Generator(DEVICE).manual_seed(0)
        randn = partial(torch.randn, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        rows, weight = randn(tokens, hidden).requires_grad_(), randn(vocab, hidden) / 32
        labels = torch.randint(0, vocab, (tokens,), generator=generator, device=DEVICE)
        peaks, times, results = {}, {}, {}
        for trained, earlier in ((True, 3072), (False, 1536)):
            leaves = [rows, weight.requires_grad_()] if trained else [rows]
            weight.requires_grad_(trained)
            for chunk_size in (None, earlier):

                def step(leaves=leaves, chunk_size=chunk_size):
                    # The number of targets is known, as in a model, so that the host does not wait.
                    loss = linear_cross_entropy(rows, weight, labels, chunk_size=chunk_size, num_targets=tokens)
                    return loss.detach(), *torch.autograd.grad(loss, leaves)

                case = trained, chunk_size
                step()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                results[case] = [x.cpu() for x in step()]
                peaks[case] = torch.cuda.max_memory_allocated() - before
                events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
                for event in events:
                    event.record()
                    step()
                torch.cuda.synchronize()
                spans = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
                times[case] = statistics.median(spans)
            self.assertLess(max(errors(results[trained, None], results[trained, earlier])), 1e-2)
            report(
                f"linear_cross_entropy, {tokens} tokens, head {'trained' if trained else 'frozen'}",
                **{
                    f"{name}, GiB": peaks[trained, size] / 2**30
                    for name, size in (("chunks", None), ("longer", earlier))
                },
                **{f"{name}, ms": times[trained, size] for name, size in (("chunks", None), ("longer", earlier))},
            )
        others = 6 * 2 * tokens * hidden + 2**26
        self.assertLess(peaks[True, None], 6 * vocab * hidden + others)
        self.assertLess(peaks[False, None], 2 * vocab * 1024 + others)
        # 2,048 rows of logits less, and 512 of a frozen head.
        self.assertGreater(peaks[True, 3072] - peaks[True, None], 0.9 * 2 * vocab * 2048)
        self.assertGreater(peaks[False, 1536] - peaks[False, None], 0.9 * 2 * vocab * 512)
