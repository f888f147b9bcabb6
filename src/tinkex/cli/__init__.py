"""The command line. Each command lives in a module of its own that is imported when the command is run."""
