"""Several processes with planes, led by one: tensor parallelism on one host. See docs/design/ranks.md."""
