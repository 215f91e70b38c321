"""Shows the answers that a PPO stage recorded, token by token, as HTML."""
