"""The tiers, their contract, and the manager over all of them."""
