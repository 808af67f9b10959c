"""The command `gdscache timeline`: a trace file read back, in figures and as a picture."""
