"""A pool of pages beyond this machine: a Mooncake Store, its client, its calls and their deadlines."""
