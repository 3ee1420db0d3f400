"""What all tests have in common."""

import signal

from hypothesis import settings

# Whoever runs the tests may ignore signals, as nohup and a shell's background jobs do. Every process that a test starts
# would inherit that, and some of them are sent just these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples every time: what a change breaks is seen with the change. Others are looked for by
# bash scripts/test.sh --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
