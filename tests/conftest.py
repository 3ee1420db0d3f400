"""What all tests have in common."""

import signal

# Whoever runs the tests may ignore signals, as nohup and a shell's background jobs do. Every process that a test starts
# would inherit that, and some of them are sent just these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
