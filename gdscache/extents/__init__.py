"""Memory that holds extents, a page a slot: the contract, on the host, on a device, and a part of one cut anew."""
