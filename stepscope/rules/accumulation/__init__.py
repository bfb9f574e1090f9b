"""Accumulation and loss weighting: ACC."""
