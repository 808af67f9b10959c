"""The gate: load a hit or compute it again, by measured costs."""
