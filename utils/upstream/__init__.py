"""Patches for Transformers: how they find what they change, how they are written, and how they are proved."""
