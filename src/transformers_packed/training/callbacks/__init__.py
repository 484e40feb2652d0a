"""Trainer callbacks."""
