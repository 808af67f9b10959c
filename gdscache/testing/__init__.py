"""For tests of code on top of gdscache: `transport_suite`, which every transport passes, and `faults`, transports that
fail on order. The rest of the package imports nothing of it; only `transport_suite` needs pytest."""
