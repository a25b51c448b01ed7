"""`python -m autotune.ddtree`: check the command line, then serve. Only the ranks import torch."""

import sys
from pathlib import Path

from autotune.ddtree.arguments import Shape, parse


def main() -> int:
    arguments = parse()
    shape = Shape.load(Path(arguments.model))
    arguments.check(shape)

    import asyncio
    import socket

    from autotune.ddtree.replica import set_logging
    from autotune.ddtree.server import Server

    set_logging(arguments.log_level)
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    listener = socket.create_server((arguments.host, arguments.port), family=family, backlog=512)

    async def serve() -> int:
        return await Server(arguments, shape).run(listener)

    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main())
