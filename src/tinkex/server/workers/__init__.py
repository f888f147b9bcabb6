"""Workers: threads that own an engine each."""
