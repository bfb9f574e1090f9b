"""What is mechanically wrong in a trace: one file per rule, and the engine that runs them."""
