"""Several processes with planes, one that decides: tensor parallelism on one host. See docs/design/ranks.md."""
