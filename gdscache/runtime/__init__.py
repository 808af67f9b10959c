"""Threads, public calls that interrupts cannot break, and what memory the machine has."""
