"""The answers of PPO that a stage recorded, token by token, as HTML."""
