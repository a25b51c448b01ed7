"""Energy meters: `meter.open_meter` chooses one; each module is one way to know joules."""
