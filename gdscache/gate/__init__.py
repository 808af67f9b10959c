"""Load or compute again: what both cost by what was measured, and the decision about every hit."""
