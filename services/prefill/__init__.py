"""The service that reads prompts and hands their KV over."""
