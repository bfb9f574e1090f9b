"""Clearing gradients: CLR."""
