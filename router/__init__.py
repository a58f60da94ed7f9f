"""The life of a request: HTTP, tokens, where it goes. Needs neither torch nor the engine."""
