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
        burn(spent, 0.2)
        subprocess.Popen([*child, "last"])
        return
    sys.stdin.readline()
    if role == "waited":
        subprocess.run([*child, "short"], check=True)
        burn(spent, 0.3)
        subprocess.run([*child, "last"], check=True)
    else:
        burn(spent, 0.3)
        subprocess.run([*child, "parent"], check=True)
        time.sleep(60)


if __name__ == "__main__":
    main()
