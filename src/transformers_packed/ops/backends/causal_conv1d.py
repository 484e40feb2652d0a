"""`causal_conv1d`: a compiled convolution that takes `seq_idx`."""

from . import importable, verify_convolution


def causal_conv1d(hidden_states, weight, bias, activation, *, boundaries):
    from causal_conv1d import causal_conv1d_fn

    seq_idx = None if boundaries is None else boundaries.seq_idx
    # The transpose of a token-major row has the channels-last layout that `seq_idx` requires.
    hidden_states = hidden_states.contiguous().transpose(1, 2)
    return causal_conv1d_fn(hidden_states, weight, bias, seq_idx=seq_idx, activation=activation).transpose(1, 2)


def verify_causal_conv1d(hidden_states, weight, bias, activation, **options):
    if reason := verify_convolution(hidden_states, activation):
        return reason
    channels, width = weight.shape
    if channels % 8 or not 2 <= width <= 4:
        return f"needs a multiple of 8 channels and a width of 2 to 4, not {channels} and {width}"
    return importable("causal_conv1d", "causal-conv1d")
