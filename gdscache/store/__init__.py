"""Stores: the handle of the caller, the plan of what goes where, and the steps that carry it out."""
