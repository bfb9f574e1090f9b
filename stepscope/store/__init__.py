"""The trace directory: the journal that is written while recording, and the trace that everything else reads."""
