"""Which pages a tier holds, in which slots, in what state, and which of them go first."""
