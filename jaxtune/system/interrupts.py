"""Makes sure that no Ctrl-C is lost where Python would drop the KeyboardInterrupt that it raises
(`raise_dropped_interrupts`)."""

from __future__ import annotations

import os
import signal
import sys
import threading

_AGAIN_SECONDS = 0.05


def raise_dropped_interrupts() -> None:
    """From now on, if Python drops a KeyboardInterrupt, this process gets SIGINT again 0.05 seconds later, so that the
    interrupt is raised where Python does not drop it. Other exceptions that Python drops are reported as before. The
    command line calls it when it starts.

    Python drops what is raised while it runs a finaliser or a callback of the garbage collector, and prints it as
    ignored; JAX registers such a callback. A command that was interrupted there would continue.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
