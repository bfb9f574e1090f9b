"""One file per framework, imported only when asked for."""
