"""The audit measures whether a causal language model keeps the documents of a packed row apart.

`audit.py` has `audit_model`. `probe.py` measures leaks between documents of a made-up row, `invariance.py` whether a
document has the same bits wherever it stands, and `isolation.py` those of a batch that is given.
`locate.py` finds the leaking module, `report.py` shows the result, `model_state.py` silences and restores the model, and
`tiny.py` builds a tiny model of any type. `acceptance.py` measures the drafts of a head of multi-token prediction.
"""

from .audit import audit_model
from .report import AuditReport


__all__ = ["AuditReport", "audit_model"]
