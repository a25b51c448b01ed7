"""Engine control: what an engine file says (`spec`), command lines (`argv`), processes (`keeper`, `server`)."""
