"""How evenly the tokens of training spread over the experts of a mixture.

During training, each router of this package has a tensor `expert_counts` on the device. A forward of the router in
training mode adds to it the number of real tokens that chose each expert. It is zero before the model's forward, and is
added to the total since the last log after that. Forwards of an evaluation and recomputations under gradient
checkpointing are not followed by this addition, and warm-ups of CUDA graphs are taken back.

The tensors are no buffers, because DDP would overwrite them with those of the first process in each forward.
"""

from typing import Any

import torch
from accelerate.utils import reduce

from ...models.cuda_graphs import forget_graphs


class ExpertLoad:
    """The load of all experts in `model` since the last call of `figures`. Only that call waits for the device.

    Args:
        model (`PreTrainedModel`):
            The model. Routers of other classes than those of this package are not counted.
        device (`torch.device`):
            The device of the computation, unless the model has a `hf_device_map`.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device):
        routers: list[Any] = [module for module in model.modules() if hasattr(type(module), "count_choices")]
        spread = getattr(model, "hf_device_map", None)
        groups: dict[tuple, list[Any]] = {}
        for router in routers:
            key = router.weight.device if spread else device, router.count_columns, router.top_k
            groups.setdefault(key, []).append(router)
        self._model, self._routers, self._blocks, self._totals = model, routers, {}, []
        # Graphs contain the addresses of the tensors, so those of an earlier instance are used again.
        there = bool(routers) and all(router.expert_counts is not None for router in routers)
        for (place, columns, top_k), members in groups.items():
            # The last column holds the number of choices to count, those of the real tokens.
            size = len(members), columns
            block = members[0].expert_counts._base if there else torch.zeros(size, dtype=torch.int64, device=place)
            for router, row in zip(members, block, strict=True):
                router.expert_counts = row
            self._blocks[place, columns, top_k] = block
            self._totals.append(torch.zeros_like(block))
        if routers and not there:
            forget_graphs(model)

    def __bool__(self) -> bool:
        return bool(self._routers)

    def start(self, tokens: int) -> None:
        """Prepare for a forward of a row that begins with this number of real tokens."""
        for (_, _, top_k), block in self._blocks.items():
            block.zero_()
            block[:, -1].fill_(tokens * top_k)

    def add(self) -> None:
        """Add the counts of the forward that has just ended."""
        torch._foreach_add_(self._totals, list(self._blocks.values()))

    def figures(self) -> dict[str, float]:
        """The metrics of all processes. Empty without experts, or if none of their routers ran."""
        loads = []
        for total in self._totals:
            counts = reduce(total[:, :-1], "sum").cpu()
            total.zero_()
            # A router that an adapter replaced with its copy does not run.
            counts = counts[counts.sum(1) > 0]
            loads.append(counts / counts.double().mean(1, keepdim=True))
        relative = torch.cat([x.flatten() for x in loads]) if loads else torch.empty(0)
        if not len(relative):
            return {}
        return {
            "expert_load_max": round(float(relative.max()), 4),
            "experts_unused": round(float((relative == 0).double().mean()), 4),
        }

    def close(self) -> None:
        """Remove the tensors from the model."""
        for router in self._routers:
            router.expert_counts = None
        if self._routers:
            forget_graphs(self._model)
