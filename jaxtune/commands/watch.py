"""The command `jaxtune watch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.terminal import say


# arguments: the words after `jaxtune watch`: the folders of one or more runs, some of which may start later, and
# perhaps --port, the page's port (default 8642; 0: a free one). The page's address is printed. ValueError: the port
# is not available.
def run(arguments: Sequence[str]) -> None:
    """Show runs side by side on a web page that this machine serves to itself, while they train; Ctrl-C ends it."""
    parser = common.parser("watch", run.__doc__)
    parser.add_argument("runs", nargs="+", metavar="run", help="folders of runs; runs may start later")
    parser.add_argument("--port", type=int, default=8642, help="port of the page; 0: a free one (default: 8642)")
    options = parser.parse_args(arguments)
    from jaxtune.train.display import watch

    with watch.server([Path(one) for one in options.runs], options.port) as server:
        say(f"http://{watch.HOST}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say()
