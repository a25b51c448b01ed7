"""The command line behind autotune/__main__.py: `verbs` does the work, `output` is what people see of it."""
