"""What goes over the line, for both sides: the table of endpoints, the codec, redaction."""
