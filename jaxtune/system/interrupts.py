"""Ctrl-C where Python would drop its KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import sys
import threading

_AGAIN_SECONDS = 0.05


def raise_dropped_interrupts() -> None:
    """Repeats SIGINT 0.05 s after Python dropped a KeyboardInterrupt, as it does in finalisers and callbacks of the
    garbage collector (JAX has one): a command interrupted there would continue.
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
