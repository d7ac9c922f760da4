"""The service that takes KV and writes the answer."""
