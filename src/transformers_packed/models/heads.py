"""What heads on top of a model do with the documents of a packed row."""

from typing import Any

import torch
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from ..boundaries import SequenceBoundaries
from ..errors import input_error


def classify_documents(
    call: str, model: Any, boundaries: SequenceBoundaries, labels: torch.Tensor | None, **inputs: Any
) -> SequenceClassifierOutputWithPast:
    """One result per document of a packed row, from its last token: `labels` `[N]`, logits `[N, num_labels]`.

    Args:
        call (`str`):
            Who asks, for messages.
        model (`PreTrainedModel`):
            A model for sequence classification.
        boundaries ([`SequenceBoundaries`]):
            The documents of the row.
        labels (`torch.LongTensor` of shape `[N]`, *optional*):
            One label per document; -100 keeps a document out of the loss.
        inputs:
            Arguments of the base model.

    Raises:
        `ValueError`: not one label per document.
    """
    outputs = getattr(model, model.base_model_prefix)(boundaries=boundaries, **inputs)
    last_tokens = boundaries.cu_seqlens[1:].long() - 1
    logits = model.score(outputs.last_hidden_state[0].index_select(0, last_tokens))
    loss = None
    if labels is not None:
        if labels.shape[0] != boundaries.num_documents:
            raise input_error(
                call,
                expected=f"labels for the row's {boundaries.num_documents} documents",
                got=f"shape {tuple(labels.shape)}",
                fix="Give one label per document; a document of tail padding carries -100.",
            )
        loss = model.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=model.config)
    return SequenceClassifierOutputWithPast(
        loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
    )
