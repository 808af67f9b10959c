"""KV events: the pages that a tier gets and loses, for routers and other views of an engine."""
