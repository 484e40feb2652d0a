"""Check that documents stay apart in a row on several ranks. Call it in each process.

It needs only a process group, so it runs on gloo and on NCCL.
"""

import torch

from transformers_packed import SequenceBoundaries
from transformers_packed.parallel import RowShard, SequenceParallel
from transformers_packed.parallel.collectives import all_gather


def find_leaks(
    model: torch.nn.Module, parallel: SequenceParallel, lengths: list[int], tolerance: float = 0.0
) -> list[tuple[str, int, int]]:
    """Find leaks between documents: (how, from document, to document). Empty on every rank if there are none.

    Each document in turn is replaced, gets a NaN, and is the only one with a gradient. The logits of all other
    documents and the gradients at their embeddings have to stay unchanged. In the third case these gradients have to
    be zero.

    Args:
        model (`torch.nn.Module`):
            A causal language model, the same on all ranks, on the device of the process group, in any dtype.
        parallel ([`SequenceParallel`]):
            The ranks that share the row.
        lengths (`list[int]`):
            The document lengths. The sum is a multiple of the number of ranks. The positions of the cuts determine the
            tested cases.
        tolerance (`float`, *optional*, defaults to 0.0):
            The largest ignored change, relative to the largest value of the document. Grouped products of experts
            change shape with the contents of other documents, and round differently then.

    Raises:
        `AssertionError`: a change of a document does not affect the document itself, so the check cannot find leaks.
    """
    weight = model.get_input_embeddings().weight
    total, generator = sum(lengths), torch.Generator().manual_seed(0)

    def draw(width):
        return torch.randn(1, total, width, generator=generator).to(weight)

    tokens, others, targets = (
        draw(weight.shape[1]),
        draw(weight.shape[1]),
        draw(model.config.get_text_config().vocab_size),
    )
    row = SequenceBoundaries.from_lengths(lengths, device=weight.device)
    shard = RowShard.cut(row, parallel.rank, parallel.size, parallel)
    part = slice(shard.start, shard.start + shard.total_length)

    def run(tokens, targets):
        """Return the logits and the gradients at the embeddings of the whole row, on every rank."""
        embeddings = tokens[:, part].clone().requires_grad_()
        logits = model(inputs_embeds=embeddings, boundaries=shard, use_cache=False).logits
        model.zero_grad()
        (logits * targets[:, part]).sum().backward()
        return tuple(all_gather(x.detach(), 1, parallel.group)[0].split(lengths) for x in (logits, embeddings.grad))

    leaks = []
    logits, gradients = run(tokens, targets)
    for document, place in enumerate(torch.arange(total).split(lengths)):
        replaced, planted, alone = tokens.clone(), tokens.clone(), torch.zeros_like(targets)
        replaced[:, place] = others[:, place]
        planted[:, place[len(place) // 2]] = float("nan")
        alone[:, place] = targets[:, place]
        zeros = [torch.zeros_like(x) for x in gradients]
        for how, found, expected in (
            ("replaced", run(replaced, targets), (logits, gradients)),
            ("NaN", run(planted, targets), (logits, gradients)),
            ("alone", (logits, run(tokens, alone)[1]), (logits, zeros)),
        ):
            for direction, values, wanted in zip(("forward", "backward"), found, expected, strict=True):
                if (how, direction) == ("alone", "forward"):
                    continue
                for other in range(len(lengths)):
                    scale = (logits if direction == "forward" else gradients)[other].abs().max()
                    same = bool(((values[other] - wanted[other]).abs() <= tolerance * scale).all())
                    if other == document:
                        assert not same, f"document {document} does not notice: {how}, {direction}"
                    elif not same:
                        leaks.append((f"{how}, {direction}", document, other))
    return leaks
