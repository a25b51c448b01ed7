"""The command line: `parser` reads it, `commands` has the verbs."""
