import unittest
from functools import partial

import torch
from common.processes import errors_of, run_processes
from parameterized import parameterized

from transformers_packed.parallel import SequenceParallel
from transformers_packed.parallel.collectives import all_gather, all_to_all, redistribute, tie


def _shape(size):
    return 1, 2 * size, 3, 4 * size


def _inputs(size, rows):
    """Create the inputs of each rank of each group, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, size, *_shape(size), dtype=torch.float64, generator=generator)


def _run(size):
    """Return each rank's results and gradients of both exchanges. The weights of the sum differ by rank and place."""
    parallel = SequenceParallel(size)
    x = _inputs(size, parallel.data_parallel_size)[parallel.data_parallel_rank, parallel.rank].requires_grad_()
    results = []
    for exchange in (lambda: all_to_all(x, 3, 1, parallel.group), lambda: all_gather(x, 2, parallel.group)):
        y = exchange()
        weights = (torch.arange(y.numel(), dtype=y.dtype) * (parallel.rank + 1)).view_as(y)
        results.append((y.detach(), torch.autograd.grad((y * weights).sum(), x)[0]))
    return results


def _run_redistribute(given, wanted):
    parallel = SequenceParallel(len(given))
    rank = parallel.rank
    start = sum(given[:rank])
    x = torch.arange(start, start + given[rank], dtype=torch.float64)[:, None].expand(-1, 2).clone().requires_grad_()
    y = redistribute(x, given, wanted, parallel.group)
    place = sum(wanted[:rank]) + torch.arange(wanted[rank], dtype=torch.float64)[:, None]
    return y.detach(), torch.autograd.grad((y * place.square()).sum(), x)[0]


def _run_unused(size):
    """Only the last rank uses the gathered tensor. The others only tie it."""
    parallel = SequenceParallel(size)
    x = torch.full((1, 2), float(parallel.rank), requires_grad=True)
    y = all_gather(x, 0, parallel.group)
    used = y.sum() if parallel.rank == size - 1 else tie(x.sum() * 0, y)
    return torch.autograd.grad(used, x)[0]


def _run_errors():
    arguments = {"size": 3}, {"size": 2, "attention": "ring"}, {"size": 0}, {"size": True}
    return errors_of(partial(SequenceParallel, **options) for options in arguments)


class CollectivesTest(unittest.TestCase):
    @parameterized.expand([(2, 2), (4, 2), (4, 4)])
    def test_results_and_gradients(self, processes, size):
        found = run_processes(_run, processes, size)
        inputs = _inputs(size, processes // size).requires_grad_()
        for row in range(processes // size):
            ranks = inputs[row]
            # The same on one process: join the inputs of all ranks and cut them.
            whole = torch.cat(ranks.unbind(0), dim=1)
            expected = [list(whole.chunk(size, dim=3)), [torch.cat(ranks.unbind(0), dim=2)] * size]
            for number, outputs in enumerate(expected):
                loss = sum(
                    (y * (torch.arange(y.numel(), dtype=y.dtype) * (rank + 1)).view_as(y)).sum()
                    for rank, y in enumerate(outputs)
                )
                (gradients,) = torch.autograd.grad(loss, inputs, retain_graph=True)
                for rank in range(size):
                    output, gradient = found[row * size + rank][number]
                    torch.testing.assert_close(output, outputs[rank].detach(), rtol=0, atol=0)
                    torch.testing.assert_close(gradient, gradients[row, rank], rtol=1e-12, atol=1e-9)

    @parameterized.expand(
        [((5, 2), (3, 4)), ((0, 6), (6, 0)), ((1, 0, 7, 2), (3, 3, 0, 4)), ((4, 4, 1, 1), (0, 0, 0, 10))]
    )
    def test_a_cut_at_other_places(self, given, wanted):
        results = run_processes(_run_redistribute, len(given), given, wanted)
        whole = torch.arange(sum(given), dtype=torch.float64)[:, None].expand(-1, 2)
        for (output, _), expected in zip(results, whole.split(wanted), strict=True):
            self.assertEqual(output.tolist(), expected.tolist())
        for (_, gradient), expected in zip(results, whole.square().split(given), strict=True):
            self.assertEqual(gradient.tolist(), expected.tolist())

    def test_a_rank_that_has_no_use_for_a_result_ties_it(self):
        for gradient in run_processes(_run_unused, 2, 2):
            self.assertEqual(gradient.tolist(), [[1.0, 1.0]])

    def test_what_does_not_fit_is_refused(self):
        for messages in run_processes(_run_errors, 2):
            self.assertEqual([type(message) for message in messages], [str] * 4)
            self.assertIn("divides the 2 processes", messages[0])

    def test_needs_a_process_group(self):
        with self.assertRaisesRegex(ValueError, "default process group"):
            SequenceParallel(2)
