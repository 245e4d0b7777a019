"""OpenAI's requests on their way to the workers."""
