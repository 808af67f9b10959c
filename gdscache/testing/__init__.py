"""For tests of code on top of gdscache: `transport_suite`, which every transport passes. It needs pytest."""
