"""Energy meters: `registry.open_meter` chooses one; each module is one source of joules."""
