"""The service around one engine: admission, streams to routers, life cycle. No torch."""
