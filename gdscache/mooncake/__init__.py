"""A tier of pages beyond this machine, in a Mooncake Store: the tier, its client, its calls and their deadlines."""
