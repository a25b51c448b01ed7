"""Where `python -m sglang.launch_server` arrives in a replay."""

from tests.replay.standin import main

if __name__ == "__main__":
    main()
