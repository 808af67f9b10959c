"""Stores: the caller's handle, the plan, and the steps that carry it out."""
