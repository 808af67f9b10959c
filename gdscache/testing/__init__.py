"""For tests of what stands on gdscache: `transport_suite`, which every transport passes, and `faults`, which make a
transport fail on order. Nothing here is imported by the rest of the package; only `transport_suite` needs pytest.
"""
