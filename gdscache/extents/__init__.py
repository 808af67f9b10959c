"""Memory that holds extents, a page a slot: the contract, on the host, and on a device."""
