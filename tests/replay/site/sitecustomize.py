"""Python imports this at its start when the folder is on PYTHONPATH: processes of a replay live by its clock."""

from tests.replay.clock import Clock

_clock = Clock.shared()
if _clock is not None:
    _clock.install()
