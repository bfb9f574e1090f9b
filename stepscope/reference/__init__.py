"""The textbook training loop: small, readable, torch only."""
