"""The engine: the public calls, and hybrid engines made of several engines."""
