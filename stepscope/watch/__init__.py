"""Observation: every patch and hook, the events they raise, and what the autograd graph tells."""
