"""The tiers, the contract that they fulfil, and the manager over all of them."""
