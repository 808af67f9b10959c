"""KV events: which pages a tier has got and lost, for routers and whoever else keeps a view of an engine."""
