"""End this process when the one that started it ends. Imported by the server from which a rank starts its processes."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == 1:  # it has ended already
    os.kill(os.getpid(), signal.SIGKILL)
