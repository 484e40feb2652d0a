"""What the output of a linear layer is a sum of.

    y_i = sum over terms of term(x)

A term computes one kind of summand for all layers with the same input `x`: biases, weights in float8, low-rank adapters,
or other weights. It knows its part of the outputs, what it saves for the backward, and its gradients. [`Products`] loops
over the terms, and autograd functions use [`Products`].

A weight that can be dequantized needs no term, but a function in `models/stored_weights.py`. A new kind of
product is a record and a term in a file of this folder, and an entry of `KINDS` in `products.py`.
"""

from .float8 import Float8, Float8Experts, Float8Weight  # noqa: F401
from .float8_blocks import BlocksWeight, Float8Blocks  # noqa: F401
from .low_rank import Adapter, LowRank  # noqa: F401
from .products import Plan, Products, Projection, planned  # noqa: F401
from .term import PIECE, Dequantized, DequantizedExperts  # noqa: F401
