"""Parameters in the optimizer: PAR."""
