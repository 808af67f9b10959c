"""The pages of one tier: slots, states, and the order of eviction."""
