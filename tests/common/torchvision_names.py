"""Declare torchvision's compiled operators, so that a torchvision for CUDA can be imported beside a torch for CPUs.

The package index has no torchvision for CPUs, and none of the tests calls these operators. `make test-integrations`
copies this module into the environment of ms-swift if torchvision cannot be imported there.
"""

import sys


class DeclareOperators:
    """A finder of modules that finds none, and declares the operators before torchvision is imported."""

    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls.library is None:
            import torch  # at the start of every process it would cost a second

            cls.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclareOperators)
