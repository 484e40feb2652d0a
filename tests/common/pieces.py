"""Attention to pieces of keys on a CPU: what cuDNN returns, by definition."""

from unittest import mock

import torch

from transformers_packed.ops import dense_attention, earlier_keys


def scores_of(query, key, is_causal, scale):
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3) * scale
    queries, keys = scores.shape[2:]
    # cuDNN's mask begins with the first key.
    mask = torch.ones(queries, keys, dtype=torch.bool).tril() if is_causal else torch.tensor(True)
    return scores.where(mask, -torch.inf)


def attend(query, key, value, is_causal, scale):
    scores = scores_of(query, key, is_causal, scale)
    groups = query.shape[1] // key.shape[1]
    output = scores.softmax(-1) @ value.repeat_interleave(groups, dim=1)
    return output, scores.logsumexp(-1)


def differentiate(gradient, query, key, value, output, sums, is_causal, scale):
    groups = query.shape[1] // key.shape[1]
    weights = (scores_of(query, key, is_causal, scale) - sums).exp()
    of_weights = gradient @ value.repeat_interleave(groups, dim=1).transpose(2, 3)
    of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdim=True)) * scale

    def per_key_head(x):
        return x.unflatten(1, (-1, groups)).sum(2)

    of_query = of_scores @ key.repeat_interleave(groups, dim=1)
    return of_query, per_key_head(of_scores.transpose(2, 3) @ query), per_key_head(weights.transpose(2, 3) @ gradient)


def on_a_cpu():
    """Let calls of cuDNN be computed by definition, whatever their length."""
    return (
        mock.patch.multiple(earlier_keys, _attend=attend, _differentiate=differentiate),
        mock.patch.multiple(dense_attention, why_not=lambda *_: "", CALL=0.0, COPY=0.0),
        mock.patch.object(earlier_keys, "padded_length", lambda length: -(-length // 8) * 8),
    )
