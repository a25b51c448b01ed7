"""A tree of processes that takes a known amount of CPU time: `python burn.py SPENT waited|orphan`.

Waits for a line of input, burns, says `done`, waits for another line. Each process adds its CPU time to SPENT.
"""

from __future__ import annotations

import subprocess
import sys
import time


def main() -> None:
    spent, role = sys.argv[1:]
    child = [sys.executable, __file__, spent]
    if role in ("waited", "orphan"):
        sys.stdin.readline()
    if role == "waited":
        subprocess.run([*child, "short"], check=True)
    while time.process_time() < {"short": 0.5, "last": 0.4, "parent": 0.2}.get(role, 0.3):
        pass
    with open(spent, "a", encoding="ascii") as file:
        file.write(f"{time.process_time()}\n")
    if role == "short":
        time.sleep(0.2)
    elif role == "last":  # the one that says that all is done
        print("done", flush=True)
        sys.stdin.readline()
    elif role == "waited":
        subprocess.run([*child, "last"], check=True)
    elif role == "parent":  # dies and leaves its child to init
        subprocess.Popen([*child, "last"])
    else:
        subprocess.run([*child, "parent"], check=True)
        time.sleep(60)


if __name__ == "__main__":
    main()
