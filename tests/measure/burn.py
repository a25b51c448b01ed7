"""A tree of processes that takes a known amount of CPU time: `python burn.py SPENT waited|orphan`.

Waits for a line of input, burns, says `done`, waits for another line. Each process adds its CPU time to SPENT.
"""

from __future__ import annotations

import subprocess
import sys
import time


def burn(spent: str, seconds: float) -> None:
    while time.process_time() < seconds:
        pass
    with open(spent, "a", encoding="ascii") as file:
        file.write(f"{time.process_time()}\n")


def main() -> None:
    spent, role = sys.argv[1:]
    child = [sys.executable, __file__, spent]
    if role == "short":
        burn(spent, 0.5)
        time.sleep(0.2)
        return
    if role == "last":  # the one that says that all is done
        burn(spent, 0.4)
        print("done", flush=True)
        sys.stdin.readline()
        return
    if role == "parent":  # dies and leaves its child to init
        subprocess.Popen([*child, "last"])
        burn(spent, 0.2)
        return
    sys.stdin.readline()
    if role == "waited":
        subprocess.run([*child, "short"], check=True)
        last = subprocess.Popen([*child, "last"])
        burn(spent, 0.3)
        last.wait()
    else:
        subprocess.run([*child, "parent"], check=True)
        burn(spent, 0.3)
        time.sleep(60)


if __name__ == "__main__":
    main()
