"""The wire format, for both sides: the table of operations, the codec, redaction."""
