"""What holds for all tests."""

from __future__ import annotations

import signal

# A job in a shell's background, or under nohup, ignores some signals, and so would the processes
# that tests start.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
