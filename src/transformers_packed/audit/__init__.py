"""The leak audit: measure, for any causal language model, whether the documents of a packed row stay apart."""

from .probe import audit_model
from .report import AuditReport


__all__ = ["AuditReport", "audit_model"]
