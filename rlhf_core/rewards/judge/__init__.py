"""Gets rewards from a chat model that judges answers: its prompts, its replies, and the client."""
