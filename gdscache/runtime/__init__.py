"""Threads, public calls and what interrupts of them end, and what memory the machine has."""
