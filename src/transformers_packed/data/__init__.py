"""Data for packed training."""
