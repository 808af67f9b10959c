"""Threads, public calls and the engine's end after an interrupted one, and the machine's memory."""
