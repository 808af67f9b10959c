"""The commands, and their exit statuses. Nothing of the engine imports them."""

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # the shells' status for Ctrl-C
