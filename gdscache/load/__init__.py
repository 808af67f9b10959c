"""Loads: the caller's handle, the plan, and the steps that carry the plan out."""
