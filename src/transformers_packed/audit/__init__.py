"""The leak audit measures whether a causal language model keeps the documents of a packed row apart."""

from .probe import audit_model
from .report import AuditReport


__all__ = ["AuditReport", "audit_model"]
