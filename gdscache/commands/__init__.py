"""The commands, and their exit statuses. Nothing of the engine imports them."""

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
