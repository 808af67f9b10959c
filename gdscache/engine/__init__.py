"""The engine: the public calls, and the engines that several engines make."""
