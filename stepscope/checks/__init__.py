"""Experiments that run a step in two ways and give a verdict with numbers."""
